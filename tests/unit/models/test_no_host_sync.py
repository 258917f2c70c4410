"""Nothing between a pack and its gradients makes the host wait for the device, or sorts.

Tensors on `meta` take a GPU's paths and have no values: a mask turned into indices, or a number
read, is an error. A copy that waits is found among torch's operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dit.config import LossMean, ObjectiveConfig, ObjectiveName, Precision, Recompute
from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import DiT
from dit.objectives.noise import insert_padding
from dit.objectives.pack_draws import with_null_inputs
from dit.objectives.registry import training_objective
from dit.pack_wire import pack_to
from dit.train.loss import loss_of
from tests.packs import random_pack, tiny_model
from tests.toy_networks import NETWORKS, level_rows, toy_model, toy_pack

META = torch.device("meta")


_SORTING = ("index_put", "index_put_", "_index_put_impl_", "embedding_dense_backward", "sort")
"""What the backward pass of plain indexing calls: on a GPU it sorts the indices."""


class _Slow(TorchDispatchMode):
    """Copies between host and device that wait for their end, and what sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []
        self.sorting: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            moved = args[0].device != out.device
            if moved and not (out.device == META and kwargs.get("non_blocking")):
                self.waiting.append(f"{args[0].device} -> {out.device} {tuple(out.shape)}")
        elif func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self.waiting.append(f"copy_ {args[1].device} -> {args[0].device}")
        elif func.overloadpacket.__name__ in _SORTING and args[0].device == META:
            self.sorting.append(f"{func.overloadpacket.__name__} {tuple(out.shape)}")
        return out


def _step(groups, model, *, name: ObjectiveName, mean: LossMean) -> DiT:
    """Problem, forward pass, loss and backward pass of a padded pack."""
    network = DiT(model, groups).train().to(META)
    batch = random_pack([(1, 4, 6), (3, 2, 5), (2, 3, 3)], [9, 1, 4], model=model)
    batch = pack_to(batch, META)
    objective = training_objective(ObjectiveConfig(name=name))
    noise_TC = insert_padding(
        torch.empty(batch.real_tokens, batch.latent_TC.shape[1], device=META), batch
    )
    with _Slow() as slow:
        quantile_N = torch.rand(batch.num_samples, dtype=torch.float64)
        noise_N = objective.levels(quantile_N, batch.num_tokens).to(META, non_blocking=True)
        problem = objective.problem_at(batch, noise_N, noise_TC)
        null_LE = torch.zeros(2, model.crossattn_emb_size, device=META)
        batch = with_null_inputs(batch, [True, False, False], {"text": null_LE})
        out_TC = network(problem.input_TC, problem.level_M, batch)
        loss_of(batch, problem, out_TC, ObjectiveConfig(loss_mean=mean)).total.backward()
    assert not slow.waiting and not slow.sorting
    return network


@pytest.mark.parametrize("mean", list(LossMean))
@pytest.mark.parametrize("name", list(ObjectiveName))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": Recompute.FULL},
        {"recompute_granularity": Recompute.SELECTIVE, "text_pad_to": 32},
        {"extra_pos_embed": ExtraPosition.LEARNABLE, "concat_padding_mask": True},
    ],
    ids=["plain", "full", "selective", "cosmos"],
)
def test_a_step_never_waits_for_the_device(groups, name, mean, changes):
    model = replace(tiny_model(precision=Precision.BF16), fused_kernels=False, **changes)
    network = _step(groups, model, name=name, mean=mean)
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("name", list(NETWORKS))
def test_other_kinds_of_layers_never_wait_either(groups, name):
    model = replace(toy_model(name, precision=Precision.BF16), fused_kernels=False)
    network = NETWORKS[name](model, groups).train().to(META)
    batch = pack_to(toy_pack(model, [(1, 4, 6), (3, 2, 5), (2, 3, 3)], [9, 1, 4]), META)
    with _Slow() as slow:
        levels = level_rows(torch.zeros(3, device=META), batch)
        network(batch.latent_TC, levels, batch).sum().backward()
    assert not slow.waiting and not slow.sorting
    assert all(p.grad is not None for p in network.parameters())


def test_the_watch_finds_what_is_slow():
    with _Slow() as slow:
        torch.zeros(3).to(META)
        torch.zeros(3, device=META).copy_(torch.ones(3))
        torch.zeros(3).to(META, non_blocking=True)
        table = torch.zeros(4, 2, device=META, requires_grad=True)
        table[torch.zeros(3, dtype=torch.int64, device=META)].sum().backward()
    assert len(slow.waiting) == 2 and len(slow.sorting) == 1
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).sum().item()


def test_copies_that_nobody_waits_for_are_from_pinned_memory(repo_root):
    """Without it `non_blocking` promises nothing; `dit.pack_wire.to_device` sees to it."""
    files = {file: file.read_text() for file in repo_root.glob("dit/**/*.py")}
    asking = {file for file, text in files.items() if "non_blocking" in text}
    assert repo_root / "dit/pack_wire.py" in asking
    pinned = ("pin_memory", "PinnedRows")
    assert [f for f in asking if not any(word in files[f] for word in pinned)] == []
