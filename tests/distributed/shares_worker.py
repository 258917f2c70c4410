"""Several processes train a tiny model with weights in shares.

`test_weights_in_shares.py` starts them. Each proof is a function of the folder that all launches
share; the first rank writes what it returns.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import load_plain_tensors
from torch.distributed.fsdp import FSDPModule

from dit.config import (
    BaseType,
    DdpConfig,
    LoraConfig,
    ParameterGroup,
    Precision,
    RunConfig,
    Sharding,
)
from dit.distributed import full_sharding
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.data_parallel import (
    chained_optimizers,
    gradient_buffers,
    named_weights,
    own_passes,
    zero_gradients,
)
from dit.distributed.full_sharding import ShardedChunk
from dit.distributed.process_groups import process_groups, start_processes
from dit.distributed.row_shares import rows_of
from dit.lora.checkpoint import DRAWN, AdapterRun
from dit.lora.targets import chosen_adapters
from dit.models.layers import per_sample
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.sizing.memory import memory
from dit.train.checkpoint import exchange
from dit.train.checkpoint.async_save import Saver
from dit.train.checkpoint.shares import SharedWeight
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint
from dit.train.model_and_optimizer import (
    LoadFrozen,
    ModelAndOptimizer,
    build_model_and_optimizer,
    randomise,
)
from dit.train.optimizer.update import clip_and_step
from dit.train.step import run_schedule
from tests.large_tensors import Large
from tests.learning import DATA, tiny_run, train
from tests.packs import random_pack

BUCKET = 2**14
"""Numbers in a bucket of a checkpoint, here."""
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def configs(
    *,
    ddp: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    lora: str = "",
    copies: int = 1,
    host: bool = False,
    **model: Any,
) -> tuple[RunConfig, RunConfig]:
    """One run with weights in shares, one with the optimizer alone.

    `ddp` has keys of the first alone, and `lora` is the type of the base of adapters. With `host`
    the moments wait in host memory.
    """
    run = tiny_run(precision=Precision(precision), **model)
    if lora:
        narrow = None if lora == precision else BaseType(lora)
        run = replace(run, lora=LoraConfig(rank=3, targets=("*blocks.*",), base_dtype=narrow))
    run = replace(run, optimizer=replace(run.optimizer, optimizer_cpu_offload=host))
    run = replace(run, ddp=DdpConfig(dp_replicate_size=copies))
    return replace(run, ddp=replace(run.ddp, sharding=Sharding.WEIGHTS, **(ddp or {}))), run


def built(config: RunConfig, load_base: LoadFrozen | None = None) -> ModelAndOptimizer:
    lora = config.lora
    return build_model_and_optimizer(
        config,
        process_groups(),
        fill=partial(randomise, seed=5),
        adapters=chosen_adapters(config.model, lora) if lora.enabled else None,
        load_base=load_base,
    )


def saved(folder: Path, name: str, model: ModelAndOptimizer, config: RunConfig) -> Path:
    on_all_ranks(lambda: (folder / name).mkdir(parents=True, exist_ok=True))
    adapters = model.adapters
    run = None if adapters is None else AdapterRun(base=DRAWN, adapters=adapters).as_json()
    saver = Saver(folder / name, config, adapters=run)
    saver.begin(model, progress=TrainProgress(step=3), data=DATA)
    done = saver.finish()
    saver.close()
    assert done is not None
    return done.path


def different(one: Path, other: Path) -> list[str]:
    """Names of stored tensors that are not the same bits, on all ranks."""
    dist.barrier()
    a, b = load_plain_tensors(str(one)), load_plain_tensors(str(other))
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    tensors = [name for name in a if torch.is_tensor(a[name])]
    assert len(tensors) > 50, len(tensors)
    return [n for n in tensors if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]


def furthest(numbers: list[float], others: list[float]) -> float:
    return max(abs(a - b) / (abs(b) or 1) for a, b in zip(numbers, others, strict=True))


def to_and_fro(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """A checkpoint goes on as it is, and through a run of the other kind and back."""
    shares, plain = configs(**settings)
    one = built(shares)
    train(one, shares, 1, 3)
    first = saved(folder, f"{name}-shares", one, shares)
    rest = train(one, shares, 4, 6)
    again = built(shares)
    load_checkpoint(first, again, config=shares)
    goes_on = train(again, shares, 4, 6) == rest
    other = built(plain)
    load_checkpoint(first, other, config=plain)
    second = saved(folder, f"{name}-plain", other, plain)
    of_other = train(other, plain, 4, 6)
    back = built(shares)
    load_checkpoint(second, back, config=shares)
    third = saved(folder, f"{name}-back", back, shares)
    return {
        "goes_on": goes_on,
        "different": [*different(first, second), *different(second, third)],
        "goes_on_after": train(back, shares, 4, 6) == rest,
        "furthest": furthest(of_other, rest),
        "uneven": sum(
            rows.shape[0] % rows.ranks > 0
            for p in one.chunks[0].parameters()
            if (rows := rows_of(p)) is not None
        ),
    }


def on_other_ranks(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    """What other ranks have saved (`to_and_fro`) is the same after a load and a save here."""
    (first,) = (folder / f"{name}-shares" / "checkpoints").glob("step_*")
    found = []
    for kind, config in zip(("shares", "plain"), configs(**settings), strict=True):
        one = built(config)
        load_checkpoint(first, one, config=config)
        number = f"{name}-{kind}-{dist.get_world_size()}-{len(settings)}"
        found += different(first, saved(folder, number, one, config))
    return {"different": found}


def bytes_of_a_rank(_: Path) -> dict[str, Any]:
    """Numbers of weights, gradients and states of each rank, and of the whole."""
    shares = configs()[0]
    groups = (ParameterGroup(pattern="*layers.0.*", frozen=True),)
    shares = replace(shares, optimizer=replace(shares.optimizer, groups=groups))
    model = built(shares)
    train(model, shares, 1, 1)
    chunk: Any = model.chunks[0]
    rows = [rows_of(p) for p in chunk.parameters()]
    here = sum(p.numel() for p in chunk.parameters())
    trained = sum(p.numel() for p in chunk.parameters() if p.requires_grad)
    (inner,) = chained_optimizers(model.optimizer)
    of_module = sum(p.to_local().numel() for p in model.modules[0].parameters())
    planned = memory(
        replace(shares, train=replace(shares.train, global_batch_size=2)), world_size=2
    )
    frozen = [m.frozen.weight for m in model.modules[0].modules() if getattr(m, "frozen", None)]
    return {
        "ranks": on_all_ranks(lambda: here),
        "whole": sum(r.shape.numel() for r in rows if r is not None),
        "rows": sum(r.part.stop - r.part.start for r in rows if r is not None) == here,
        "module": of_module == here,
        "frozen": [type(weight.data).__name__ for weight in frozen][:1],
        "gradients": sum(g.numel() for g in chunk.gradients()) == trained,
        "moments": [
            sum(state[name].numel() for state in inner.optimizer.state.values()) == trained
            for name in ("exp_avg", "exp_avg_sq")
        ],
        "planned": [planned.weights, planned.gradients, planned.optimizer],
        "held": [4 * here, 4 * trained, 8 * trained],
    }


def not_finite_on_one_rank(_: Path) -> dict[str, Any]:
    """A step that one rank cannot make is made by none, and training goes on."""
    shares = configs()[0]
    model = built(shares)
    train(model, shares, 1, 1)
    before = [p.detach().clone() for p in model.chunks[0].parameters()]
    zero_gradients(model.chunks, model.optimizer)
    run_schedule(model.chunks, [item(shares)], options=shares.objective)
    if dist.get_rank() == 1:
        gradient_buffers(model.chunks)[0].fill_(torch.nan)
    update = clip_and_step(model.optimizer, clip_grad=1.0)
    now = model.chunks[0].parameters()
    same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    return {
        "skipped": on_all_ranks(lambda: update.skipped and same),
        "next": train(model, shares, 2, 2),
    }


def held_gradient(_: Path) -> list[bool]:
    """Whether a rank has a gradient of a weight whose hook holds the second half of its rows."""
    shares, init = configs()[0], ShardedChunk.__init__

    def first_half(gradient: torch.Tensor) -> torch.Tensor:
        first, second = gradient.chunk(2)
        return torch.cat((first, torch.zeros_like(second)))

    def hooked(chunk: ShardedChunk, module: Any, *others: Any) -> None:
        names, weights = zip(*module.named_parameters(), strict=True)
        chosen.append(next(name for name in names if "layers" in name))
        weights[names.index(chosen[0])].register_hook(first_half)
        init(chunk, module, *others)

    chosen: list[str] = []
    with patch.object(ShardedChunk, "__init__", hooked):
        model = built(shares)
    run_schedule(model.chunks, [item(shares)], options=shares.objective)
    gradient = dict(named_weights(model.chunks[0]))[chosen[0]].grad
    assert gradient is not None
    return on_all_ranks(lambda: bool(gradient.any()))


def item(config: RunConfig, *sizes: tuple[int, int, int]) -> Any:
    batch = random_pack([*(sizes or [(1, 4, 4)])], [3] * max(len(sizes), 1), model=config.model)
    null = {"text": torch.zeros(1, 8)}
    objective = training_objective(config.objective)
    return training_problem(objective, batch, seed=1, step=1, null=null, options=config.objective)


def passes_of_each_rank(_: Path, **ddp: Any) -> dict[str, Any]:
    """Ranks make 0, 1 and 3 passes; each gets the loss that complete weights give."""
    found = {}
    for name, config in zip(("shares", "plain"), configs(ddp=ddp), strict=True):
        model = built(config)
        wanted, losses = (0, 1, 3)[dist.get_rank() % 3], []
        if dist.get_world_size() == 2:
            wanted = (0, 3)[dist.get_rank()]
        with torch.no_grad(), own_passes(model.chunks):
            for number in range(wanted):
                one = [item(config, (1, 2 + 2 * number, 4))]
                losses += run_schedule(
                    model.chunks, one, options=config.objective, forward_only=True
                )
        mine = [float(loss.total) for loss, _ in losses]
        found[name] = on_all_ranks(lambda mine=mine: mine)
        found[f"{name} then"] = train(model, config, 1, 1)
    return found


def beside_the_other(_: Path, fault: str = "", **settings: Any) -> Any:
    """Losses and norms of two steps beside those of a sharded optimizer.

    Where `fused_kernels` are asked for, Triton's interpreter runs them with weights in shares.
    """
    shares, plain = configs(**settings)
    plain = replace(plain, optimizer=replace(plain.optimizer, optimizer_cpu_offload=False))
    wrong: Any = nullcontext()
    if fault == "divided":
        wrong = patch.object(FSDPModule, "set_gradient_divide_factor")
    elif fault == "cast":
        policy = full_sharding._policy
        wrong = patch.object(
            full_sharding,
            "_policy",
            lambda *of: replace(policy(*of), cast_forward_inputs=True),
        )
    elif fault == "marks":
        wrong = patch.object(full_sharding, "_marks", lambda weight: {})
    with wrong:
        made = built(shares)
    interpreted = bool(settings.get("fused_kernels"))
    with patch.object(per_sample, "kernels_run_on", lambda device: interpreted):
        found = train(made, shares, 1, 2)
    wanted = train(built(plain), plain, 1, 2)
    return {"loss": furthest(found[:1], wanted[:1]), "furthest": furthest(found, wanted)}


def most_at_one_time(folder: Path, layers: int) -> dict[str, Any]:
    """The most numbers of weights and states on a rank, by what it does; and what is allowed."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_layers": layers}
    shares = configs(**sizes)[0]
    on_host, most = SharedWeight.on_host, {"held": 0}

    def counted(name: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        count = Large()
        for tensor in held:
            count.see(tensor)
        before = count.alive()
        with count:
            out = lambda w, *of: count.leave_out(on_host(w, *of))  # noqa: E731
            with (
                patch.object(SharedWeight, "on_host", out),
                patch.object(exchange, "BUCKET_BYTES", 4 * BUCKET),
            ):
                result = work()
        most[name], most["held"] = count.most, before
        return result

    held: list[torch.Tensor] = []
    model = counted("fresh start", lambda: built(shares))
    held = [*states_of(model)]
    path = counted("save", lambda: saved(folder, f"most-{layers}", model, shares))
    counted("resume", lambda: load_checkpoint(path, model, config=shares))
    assert model.ema is not None

    def passes() -> None:
        with torch.no_grad():
            for _ in range(2):
                with own_passes(model.chunks):
                    for _ in range((0, 1, 3, 0)[dist.get_rank()]):
                        one = [item(shares, (1, 2, 2))]
                        run_schedule(model.chunks, one, options=shares.objective, forward_only=True)
                with model.ema.as_weights(model.chunks):
                    pass

    counted("passes", passes)
    whole = {n: p for n, p in model.modules[0].named_parameters()}
    of_layers = sum(p.shape.numel() for n, p in whole.items() if ".layers." in n) // layers
    root = sum(p.shape.numel() for n, p in whole.items() if ".layers." not in n)
    return {"most": most, "layer": of_layers, "root": root, "bucket": BUCKET}


def states_of(model: ModelAndOptimizer) -> list[torch.Tensor]:
    """Weights, average and states of this rank."""
    (inner,) = chained_optimizers(model.optimizer)
    assert model.ema is not None
    moments = [t for state in inner.optimizer.state.values() for t in state.values()]
    return [*model.chunks[0].parameters(), *model.ema.averages, *moments]


def main(known: Mapping[str, Any]) -> None:
    """Makes the proofs of the command line, by their names in `known`."""
    folder, results = Path(sys.argv[1]), []
    for name, settings in json.loads(sys.argv[2]):
        sizes = {k: v for k, v in settings.items() if k in TENSOR}
        copies = settings.get("copies", 1)
        start_processes(seed=1, model=tiny_run(**sizes).model, dp_replicate_size=copies)
        results.append(known[name](folder, **settings))
    if dist.get_rank() == 0:
        written = folder / f"results_{dist.get_world_size()}.json"
        written.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from tests.distributed import shares_in_a_step

    main(globals() | vars(shares_in_a_step))
