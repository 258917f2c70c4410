"""Several processes give adapters a base in 8 bits, in shares or with the optimizer alone.

`test_base_in_shares.py` starts them. The folder that all proofs share has a Diffusers folder for
each number of layers.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from dit.config import RunConfig, Sharding
from dit.config_loading import load_config
from dit.convert.diffusers_checkpoint import DiffusersFolder
from dit.convert.import_ import import_weights
from dit.convert.load_hf import start
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.data_parallel import named_weights, own_passes
from dit.distributed.model_parallel import FullForward
from dit.distributed.process_groups import process_groups
from dit.distributed.row_shares import rows_of
from dit.models.layers.adaptable import adapters_off
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.train.checkpoint.adapters import adapters_at_start
from dit.train.checkpoint.starting_point import StartingPoint
from dit.train.model_and_optimizer import ModelAndOptimizer, build_model_and_optimizer
from dit.train.step import run_schedule
from recipes.runs import dit_debug, for_weights
from tests.distributed import shares_worker
from tests.distributed.shares_worker import configs, furthest, item, main, states_of
from tests.large_tensors import Large
from tests.learning import train


def config_of(hf: Path, kind: Sharding = Sharding.WEIGHTS, **model: Any) -> RunConfig:
    """A run of adapters beside a Diffusers folder."""
    words = [f"model.{key}={value}" for key, value in model.items()]
    words += [f"checkpoint.load_hf={hf}", "checkpoint.save=null", f"ddp.sharding={kind}"]
    words += ["lora.rank=3", 'lora.targets=["*blocks.*"]', "lora.base_dtype=float8_e4m3"]
    return load_config(dit_debug(), overrides=words, adapt=for_weights)


def built(config: RunConfig) -> ModelAndOptimizer:
    """As a run begins."""
    adapted = adapters_at_start(config, StartingPoint(), start.weights_of_folder, print)
    groups = process_groups()
    return build_model_and_optimizer(
        config,
        groups,
        fill=adapted.first_values(config),
        adapters=adapted.run.adapters,
        load_base=partial(adapted.load_base, model=config.model, groups=groups),
    )


def of_layers(model: ModelAndOptimizer) -> dict[str, Any]:
    """The linears of the layers, whose matrices are in 8 bits, by name."""
    named = model.modules[0].named_modules()
    return {name: module for name, module in named if getattr(module, "frozen", None) is not None}


def beside_the_other(folder: Path, imported: bool = False, **model: Any) -> dict[str, Any]:
    """The base in shares beside that of a sharded optimizer, which has whole matrices.

    Of a Diffusers folder, or of a checkpoint that is one.
    """
    made, numbers, ours = {}, {}, folder / "2.ours"
    if imported:
        import_weights(folder / "2.hf", ours)
    for kind in Sharding:
        config = config_of(folder / "2.hf", kind, **model)
        if imported:
            at = replace(config.checkpoint, load_hf=None, load=str(ours), finetune=True)
            config = replace(config, checkpoint=at)
        made[kind] = built(config)
        numbers[kind] = train(made[kind], config, 1, 2)
    shares, plain = made[Sharding.WEIGHTS], of_layers(made[Sharding.OPTIMIZER])
    chunk: Any = shares.chunks[0]
    kept = {name: own for name, own in named_weights(chunk) if own.dtype is torch.uint8}
    assert kept.keys() == {f"{name}.weight" for name in plain}
    whole = [rows_of(own) for own in kept.values()]
    for unit in chunk.module.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    different = [
        name
        for name, linear in of_layers(shares).items()
        if not torch.equal(_numbers(linear), plain[name].weight.view(torch.uint8))
        or not torch.equal(linear.frozen(), plain[name].frozen())
    ]
    return {
        "matrices": len(plain),
        "different": on_all_ranks(lambda: different),
        "loss": furthest(numbers[Sharding.WEIGHTS][::2], numbers[Sharding.OPTIMIZER][::2]),
        "norm": furthest(numbers[Sharding.WEIGHTS][1::2], numbers[Sharding.OPTIMIZER][1::2]),
        "bytes": on_all_ranks(lambda: sum(own.nbytes for own in kept.values())),
        "whole": sum(
            one.shape[0] * (one.shape[1] // 16 * 16 + 16) for one in whole if one is not None
        ),
        "uneven": sum(one.shape[0] % one.ranks > 0 for one in whole if one is not None),
    }


def _numbers(linear: Any) -> torch.Tensor:
    """The bytes of a matrix, without what its rows end in."""
    return linear.weight[:, : linear.frozen.rows.width]


class HostTensors:
    """Counts what the reading of a Diffusers folder holds in host memory: a weight at a time."""

    def __init__(self) -> None:
        self.alive: list[StorageWeakRef] = []
        self.before = self.most = self.largest = 0

    def numbers(self) -> int:
        """Bytes of the tensors that were read and are still held."""
        self.alive = [one for one in self.alive if not one.expired()]
        found = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self.alive)
        return sum(one.nbytes() for one in found if one is not None)

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        self.alive.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, self.numbers())
        return tensor

    def part(self, own: Callable[..., torch.Tensor], *of: Any) -> torch.Tensor:
        self.before = max(self.before, self.numbers())
        made = self.see(own(*of))
        self.largest = max(self.largest, made.nbytes)
        return made


def read_one_at_a_time(folder: Path, **model: Any) -> dict[str, Any]:
    """What each rank holds before it reads a weight, and at most; the largest weight in bytes."""
    count, read, part = HostTensors(), DiffusersFolder.read, start._part
    with (
        patch.object(DiffusersFolder, "read", lambda *of: count.see(read(*of))),
        patch.object(start, "_part", partial(count.part, part)),
    ):
        built(config_of(folder / "2.hf", **model))
    return {
        "before": on_all_ranks(lambda: count.before),
        "most": on_all_ranks(lambda: count.most),
        "largest": max(on_all_ranks(lambda: count.largest)),
    }


def most_at_one_time(folder: Path, layers: int) -> dict[str, Any]:
    """The most bytes of weights and states on a rank at a start, and in 0, 1 and 3 passes."""
    config, most = config_of(folder / f"{layers}.hf", precision="bf16"), {}

    def counted(name: str, work: Callable[[], Any], held: list[torch.Tensor]) -> Any:
        gc.collect()
        count = Large()
        for tensor in held:
            count.see(tensor)
        with count:
            result = work()
        most[name] = 4 * count.most
        return result

    def passes() -> None:
        with torch.no_grad(), own_passes(model.chunks):
            for _ in range((0, 1, 3, 0)[dist.get_rank()]):
                one = [item(config, (1, 2, 2))]
                run_schedule(model.chunks, one, options=config.objective, forward_only=True)

    model = counted("start", lambda: built(config), [])
    held = states_of(model)
    counted("passes", passes, held)
    count = Large()
    for tensor in held:
        count.see(tensor)
    sizes: dict[bool, int] = {True: 0, False: 0}
    for name, own in named_weights(model.chunks[0]):
        rows = rows_of(own)
        assert rows is not None
        wide = rows.shape.numel() * (1 if own.dtype is torch.uint8 else rows.dtype.itemsize)
        sizes[".layers." in name] += wide
    return {
        "most": most,
        "held": 4 * count.alive(),
        "layer": sizes[True] // layers,
        "root": sizes[False],
    }


def samples(_: Path, **settings: Any) -> list[dict[str, Any]]:
    """Of 0, 1 and 3 prompts for all ranks, beside those that a rank makes with whole weights.

    With averages for weights; and without adapters, where there are any.
    """
    models = [(shares_worker.built(config), config) for config in configs(**settings)]
    for model, config in models:
        train(model, config, 1, 2)
    found = []
    for prompts, off in product((0, 1, 3), (False, True) if "lora" in settings else (False,)):
        mine = range(dist.get_rank(), prompts, dist.get_world_size())
        latents = [drawn(*one, numbers=mine, off=off) for one in models]
        apart = [float((a - b).abs().max() / b.std()) for a, b in zip(*latents, strict=True)]
        found.append({"apart": on_all_ranks(lambda apart=apart: apart), "prompts": prompts})
    return found


def drawn(
    model: ModelAndOptimizer, config: RunConfig, *, numbers: Sequence[int], off: bool
) -> list[torch.Tensor]:
    """Latents of the prompts of these numbers."""
    requests = [
        Request(
            inputs={"text": torch.randn(4, 8, generator=torch.Generator().manual_seed(number))},
            negative={"text": torch.zeros(1, 8)},
            latent_FHW=(1, 4, 2 + 2 * number),
            fps=math.nan,
            seed=number,
        )
        for number in numbers
    ]
    assert model.ema is not None
    network, settings = FullForward(model.chunks), SamplingSettings(num_steps=2, guidance=3.0)
    without = adapters_off(network) if off else nullcontext()
    with without, model.ema.as_weights(model.chunks), own_passes(model.chunks):
        return generate_latents(network, requests, config=config, settings=settings)


if __name__ == "__main__":
    main(globals())
