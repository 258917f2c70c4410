"""Compares a user's network on one process and on layouts, over five steps of training.

Gradients may differ by r: ROUNDING times the root mean square of the tensor's gradient, or SMALL
times that of all gradients, since some gradients are only rounding errors. Weights may differ by
the effect of r on steps of Adam.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from dit.layout_check.adam_gaps import update_gaps
from tools.check_parallel import RankLayout

SEED, STEPS, RATE, BETAS, EPS = 1, 5, 1e-3, (0.9, 0.999), 1e-8  # the last three are Adam's
ROUNDING, SMALL = 1e-5, 1e-2  # measured: up to 2e-6 of a gradient
ONE = RankLayout("one process", "", dp=1, cp=1)
Tensors = dict[str, Tensor]


class RefusedModuleError(Exception):
    """A module cannot be checked; the message is the reason, as one sentence."""


@dataclass(kw_only=True, slots=True)
class Run:
    """The results of a layout, with whole tensors by name."""

    start: dict[str, str]  # digests of weights before the first step
    losses: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)  # of the first step
    weights: Tensors = field(default_factory=dict)  # after the last one
    allowed: Tensors = field(default_factory=dict)  # in one process: what rounding may change
    torn: list[str] = field(default_factory=list)  # weights whose copies differ between ranks


def start(modules: Sequence[str], layouts: Sequence[RankLayout]) -> int:
    """Checks `modules` on `layouts` in new processes, and prints the results.

    Returns the exit code: 0 equal, 1 not equal, 2 not checked.
    """
    processes, verdict = max(one.dp * one.cp for one in layouts), get_context("fork").SimpleQueue()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, dict.fromkeys(modules), dict.fromkeys(layouts), verdict)
        try:  # forks, which have imported torch already
            start_processes(_work, arguments, nprocs=processes, start_method="fork")
        except ProcessException as error:
            sys.stderr.write(f"{error}\n")
            return 2
    return verdict.get()


def _work(rank: int, folder: str, modules: Any, layouts: Any, verdict: Any) -> None:
    sys.path.insert(0, os.getcwd())
    text = ""
    for name in modules:
        lines, place = [name], f"{folder}/{name}"
        try:
            functions = _functions(name)
            one = _run(functions, ONE, None, rank=0, meeting=f"{place} {rank}")
            for layout in layouts:
                if rank < layout.dp * layout.cp:
                    run = _run(functions, layout, one, rank=rank, meeting=f"{place} {layout.name}")
                    lines += [f"{layout.name}: {differences(run, one)}"]
        except RefusedModuleError as refused:
            lines = [name, f"not checked: {refused}"]
        text += "\n  ".join(lines) + "\n"
    if rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
        verdict.put(2 if "not checked: " in text else int("WRONG: " in text))


def _functions(name: str) -> tuple[Any, Any, Any]:
    try:
        target = resolve_name(name if ":" in name else f"{name}:")
        return target.build, target.batches, target.forward_loss
    except Exception as error:  # whatever the module's own code raises
        raise RefusedModuleError(
            f"{name} cannot be imported: {error!r}; it must define build, batches and forward_loss"
        ) from error


def _run(functions: Any, layout: RankLayout, one: Run | None, *, rank: int, meeting: str) -> Run:
    size, (build, batches, forward_loss) = layout.dp * layout.cp, functions
    of_group: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(minutes=5)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", **of_group)
    try:
        mesh = init_device_mesh("cpu", (layout.dp, layout.cp), mesh_dim_names=("dp", "cp"))
        torch.manual_seed(SEED)
        module = build(mesh)
        every = _digests_of_ranks(module)
        run = Run(start=every[0])
        _refuse_others(every, (one or run).start, layout)
        unused = one is not None and not all(one.any() for one in one.gradients.values())
        wrapped = _wrapped(module, layout, unused=unused)
        optimizer = torch.optim.Adam(module.parameters(), lr=RATE, betas=BETAS, eps=EPS)
        for step, batch in enumerate(batches(SEED, STEPS), start=1):
            mine = _share(batch, step, mesh["dp"])
            run.losses.append(_backward(forward_loss(wrapped, mine)))
            run.gradients = run.gradients or _gradients(module)
            optimizer.step()
            if layout is ONE:
                _allow(run, module, optimizer, step)
            optimizer.zero_grad()
        run.weights = {name: _whole(weight) for name, weight in module.named_parameters()}
        every = _digests_of_ranks(module)
        run.torn = [name for name in run.weights if len({digests[name] for digests in every}) > 1]
        return run
    finally:
        dist.destroy_process_group()


def _digests_of_ranks(module: nn.Module) -> list[dict[str, str]]:
    whole = {name: _whole(weight).flatten() for name, weight in module.named_parameters()}
    bits = {name: weight.view(torch.uint8).numpy().tobytes() for name, weight in whole.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {k: hashlib.blake2b(one).hexdigest() for k, one in bits.items()})
    return every


def _refuse_others(every: list[dict[str, str]], start: dict[str, str], layout: RankLayout) -> None:
    """Checks that each rank of `layout` starts from the weights of one process.

    `every` has hashes of each rank's weights by name, `start` those of one process. DDP would hide
    a difference, because it copies the first rank's weights.

    Raises:
        RefusedModuleError: the weights of a rank differ.
    """
    for rank, mine in enumerate(every):
        if names := [name for name in start | mine if mine.get(name) != start.get(name)]:
            where = f"on rank {rank} of {layout.name} than in one process; make it return the same"
            raise RefusedModuleError(f"build gives {names[0]} other values {where}")


def _wrapped(module: nn.Module, layout: RankLayout, *, unused: bool) -> nn.Module:
    if layout.kind == "ddp":
        return DistributedDataParallel(module, find_unused_parameters=unused)
    lists = [one for one in module.modules() if isinstance(one, nn.ModuleList)]
    blocks = [block for blocks in reversed(lists) for block in blocks]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in dict.fromkeys([*blocks, module] if layout.kind == "fsdp2" else []):
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            fully_shard(block, mesh=mesh)
    return module


def _share(batch: Any, step: int, mesh: DeviceMesh) -> Any:
    """This rank's samples of `batch`: each tensor's part along the first axis.

    Tensors without axes are kept whole. `step` is used only in the error's text.

    Raises:
        RefusedModuleError: the samples cannot be divided evenly.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    for one in tree_leaves(batch):
        if isinstance(one, Tensor) and one.ndim and len(one) % size:
            raise RefusedModuleError(
                f"batch {step} has a tensor of {tuple(one.shape)}, and {size} data ranks cannot"
                f" divide its first axis; let `batches` return a multiple of {size} samples"
            )
    return tree_map_only(Tensor, lambda one: one.chunk(size)[rank] if one.ndim else one, batch)


def _backward(found: Any) -> float:
    """Runs the backward pass of the mean loss over all ranks, and returns that mean.

    `found` is the pair (sum, count) that `forward_loss` returned. The loss is scaled by the number
    of ranks, because DDP and FSDP2 average gradients.

    Raises:
        RefusedModuleError: `found` is not a pair of a sum and a count, or the counts add up to 0.
    """
    pair = found if isinstance(found, (tuple, list)) else [found]
    if len(pair) != 2 or not isinstance(pair[0], Tensor) or pair[0].numel() != 1:
        names = ", ".join(type(one).__name__ for one in pair)
        raise RefusedModuleError(
            f"forward_loss returns {names}, not a sum and a count; return both"
        )
    sums = torch.tensor([pair[0].item(), float(pair[1])], dtype=torch.float64)
    dist.all_reduce(sums)
    if not sums[1] > 0:
        raise RefusedModuleError(
            f"the counts of forward_loss add up to {sums[1]:g} over all ranks; return"
            " the number of terms of each sum, which must be above 0"
        )
    (pair[0].sum() * (dist.get_world_size() / sums[1].item())).backward()
    return (sums[0] / sums[1]).item()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _gradients(module: nn.Module) -> Tensors:
    found = {name: (weight, weight.grad) for name, weight in module.named_parameters()}
    return {k: _whole(torch.zeros_like(w) if g is None else g) for k, (w, g) in found.items()}


def _rms(*tensors: Tensor) -> float:
    return torch.cat([one.double().flatten() for one in tensors]).square().mean().sqrt().item()


def _rounding(gradients: Tensors) -> dict[str, float]:
    least = SMALL * _rms(*gradients.values())
    return {name: ROUNDING * max(_rms(one), least) for name, one in gradients.items()}


def _allow(run: Run, module: nn.Module, optimizer: torch.optim.Adam, step: int) -> None:
    rounding = _rounding(_gradients(module))
    for name, weight in module.named_parameters():
        squares = optimizer.state[weight].get("exp_avg_sq", torch.zeros_like(weight))
        mean_square = squares / (1 - BETAS[1] ** step)
        moves = RATE * update_gaps(rounding[name], mean_square, eps=EPS)
        kept = torch.finfo(torch.float32).eps * weight.detach().abs()  # of a sum in float32
        run.allowed[name] = run.allowed.get(name, 0) + moves + kept


def differences(run: Run, one: Run) -> str:
    """Compares the results `run` of a layout with the results `one` of one process.

    Returns a line of figures, then a line for each fault.
    """
    rounding = _rounding(one.gradients)
    losses = [abs(a / b - 1) for a, b in zip(run.losses, one.losses, strict=True)]
    away = {k: _rms(run.gradients[k] - g) / rounding[k] for k, g in one.gradients.items()}
    moved = {k: (run.weights[k] - w).abs() / one.allowed[k] for k, w in one.weights.items()}
    excess = {name: ratios.max().item() for name, ratios in moved.items()}
    most, moves = max(away.values()) * ROUNDING, f"{max(excess.values()):.2g} of their bound"
    lines = [f"losses differ by {max(losses):.0e}, gradients by {most:.0e}, weights by {moves}"]
    if step := next((step for step, loss in enumerate(losses, 1) if not loss <= ROUNDING), 0):
        found, expected = run.losses[step - 1], one.losses[step - 1]
        lines.append(f"loss of step {step} is {found:.6g}, not {expected:.6g}")
    groups = defaultdict(list)
    for name in sorted((name for name in away if not away[name] <= 1), key=away.__getitem__):
        g, found = one.gradients[name], run.gradients[name]
        times = ((found * g).sum() / g.square().sum()).item()
        scaled = _rms(found - times * g) <= 10 * rounding[name]
        what = f"are {times:.4g} times those of one process" if scaled else "differ"
        groups[f"gradients that {what}"].append(name)
    far = sorted((name for name in excess if not excess[name] <= 1), key=excess.__getitem__)
    groups["weights that differ by more than rounding explains"] = far
    groups["weights whose copies differ between ranks"] = run.torn
    lines += [f"{k}: {len(n)} of {len(away)}, most {n[-1]}" for k, n in groups.items() if n]
    return "\n  WRONG: ".join(lines)
