"""What layers keep for the backward pass: traces of one layer against whole networks on `meta`.

Networks are built of some layers, and of one more; packs are larger than those of the traces.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dit.batch import PackedBatch, Problem
from dit.config import ContextComm, ModelConfig, Precision, Recompute
from dit.distributed.model_parallel import split_tokens
from dit.models.layers.context_parallel import Context
from dit.models.registry import families, family_of, has_sound, named_model, network_spec
from dit.pack_wire import pack_to
from dit.sizing.cuda_kernels import META, CudaKernels
from dit.sizing.kept import kept_by_layer
from dit.sizing.meta_network import groups_as_given, meta_pack
from tests.packs import random_pack, tiny_model


def _layers(name: str) -> tuple[Any, ...]:
    """What the layers of a named size have: its switches and words, and which sizes are not 0."""
    model = named_model(name)
    values = {one.name: getattr(model, one.name) for one in fields(model) if one.name != "name"}
    of = {k: bool(v) if type(v) in (int, float) else v for k, v in values.items()}
    return type(model), *(repr(v) for v in of.values())


NAMES = [name for family in families() for name in family.sizes]
NAMES.remove("hunyuanimage_21_distilled")  # of mean flow, which is not trained
OFTEN = ("dit_xl", "wan2.1_t2v_1.3b", "flux1_dev", "sd3.5_medium", "chroma", "flux2_klein_4b")
# One of each kind of layers.
NAMES = [*{_layers(name): name for name in (*NAMES, *OFTEN)}.values()]
LAYERS = ("num_layers", "num_single_layers", "dual_attention_layers")
REFINERS = "num_refiner_layers"
"""Of stacks of their own; others refine the text before all stacks."""
GRID, TEXT, HEARD = (1, 48, 48), 128, 704


def counted(model: ModelConfig, groups) -> float:
    """Bytes that all layers keep of a pack, from one layer more of each."""
    stacks = {stack.name for stack in network_spec(model).stacks}
    names = (*LAYERS, REFINERS) if "noise_refiner" in stacks else LAYERS
    counts = {name: count for name in names if (count := getattr(model, name, 0))}
    few = replace(model, **(dict.fromkeys(counts, 1) | {"num_layers": 2}))
    batch = _pack(few, groups)
    base, total = _kept(few, batch, groups), 0.0
    for name, count in counts.items():
        more = replace(few, **{name: getattr(few, name) + 1})
        total += count * (_kept(more, batch, groups) - base)
    return total


def _kept(model: ModelConfig, batch: PackedBatch, groups) -> int:
    """Bytes of all tensors but weights that autograd keeps in a forward pass, as on CUDA."""
    with META:
        network = family_of(model).network()(model, groups)
    network.train().to(META)
    weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return x

    level_M = torch.empty(batch.num_levels, device=META)
    with groups_as_given(), CudaKernels(), saved_tensors_hooks(keep, lambda x: x):
        network(batch.latent_TC.float(), level_M, batch)
    return sum(storage.nbytes() for storage in kept.values())


def _pack(model: ModelConfig, groups) -> PackedBatch:
    """Two samples: with one, latents and text are in joint order already, and nothing is copied."""
    network: Any = family_of(model).network()
    context = Context(
        group=groups.cp,
        comm=model.cp_comm_type,
        shares_samples=network.shares_samples,
    )
    if has_sound(model):  # each sample has one
        sizes = {"side": GRID[1], "text": TEXT, "samples": 2, "sound": HEARD}
        return meta_pack(model, **sizes, share=context.share)
    batch = random_pack([GRID] * 2, [TEXT] * 2, model=model, guidance=1.0)
    x_TC, x_N = torch.zeros(len(batch.segment_T), 1), torch.zeros(2)
    problem = Problem(input_TC=x_TC, target_TC=x_TC, level_M=x_N, weight_N=x_N, noise_N=x_N)
    return pack_to(split_tokens(batch, problem, share=context.share, multiple=1)[0], META)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in NAMES]
)
def test_a_layer_keeps_what_one_layer_more_does(name: str, fused: bool, groups) -> None:
    model = _named(name, fused_kernels=fused)
    assert counted(model, groups) == pytest.approx(_traced(model), rel=0.01)


def test_refiners_of_references_keep_what_one_more_does(groups) -> None:
    """Of a pack with a reference; many of them, so that one kind of layer too few is seen."""
    model = _named("omnigen2", reference_latents=1, num_refiner_layers=8, num_layers=8)
    assert counted(model, groups) == pytest.approx(_traced(model), rel=0.05)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["dit_xl", "wan2.1_t2v_1.3b"])
def test_recomputed_layers_keep_their_input(name: str, fused: bool, groups) -> None:
    selective = _named(name, fused_kernels=fused, recompute_granularity=Recompute.SELECTIVE)
    assert counted(selective, groups) == pytest.approx(_traced(selective), rel=0.01)
    full = replace(selective, recompute_granularity=Recompute.FULL)
    rows = 2 * math.prod(GRID) * network_spec(full).layers
    assert counted(full, groups) == pytest.approx(2 * rows * full.hidden_size, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("comm", [ContextComm.A2A, ContextComm.ALL_GATHER])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["dit_xl", "wan2.1_t2v_1.3b", "flux1_dev", "sound_dit_b"])
def test_what_context_ranks_exchange_is_counted(
    name: str, fused: bool, comm: ContextComm, ranks: int, groups
) -> None:
    shared = copy(groups)
    shared.cp = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    sizes = {"context_parallel_size": ranks, "cp_comm_type": comm}
    model = _named(name, fused_kernels=fused, **sizes)
    assert counted(model, shared) == pytest.approx(_traced(model), rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_keeps_the_keys_and_values_that_arrive_last(ranks: int) -> None:
    """`AttnFuncWithCPAndKVP2P` of Transformer Engine saves q, p2p_comm_buffers[-1], out and sums.

    These are tensors of their own, where a rank without a ring keeps views of another one.
    """
    model = _named("dit_xl", fused_kernels=True)
    ring = replace(model, context_parallel_size=ranks, cp_comm_type=ContextComm.P2P)
    more = kept_by_layer(ring).token - kept_by_layer(model).token
    assert more == pytest.approx(2 * 2 * model.hidden_size)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 18 + 2 * 4),
        ({"fused_kernels": False}, 29 + 2 * 4),
        ({"compile": True}, 29 + 2 * 4),
        ({"mlp_ratio": 2.5}, 18 + 2 * 2.5),
        ({"tensor_model_parallel_size": 2}, 9 + (9 + 8) / 2),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, (18 + 8) / 2),
    ],
)
def test_what_a_layer_keeps_follows_from_its_parts(changes: dict, kept: float) -> None:
    """In float32 numbers for each token and unit of width; few for each token come on top."""
    model = tiny_model(**changes)
    found = kept_by_layer(model).token / model.hidden_size
    assert 4 * kept < found < 4.1 * kept


def _named(name: str, **changes: Any) -> ModelConfig:
    return replace(named_model(name), name="custom", precision=Precision.BF16, **changes)


def _traced(model: ModelConfig) -> float:
    """Like `counted`."""
    spec = network_spec(model)
    text, ranks = sum(spec.text([spec.image_rows + TEXT] * 2)), model.context_parallel_size
    tokens, kept = 2 * math.prod(GRID), kept_by_layer(model)
    if ranks > 1 and spec.attends_jointly:
        return spec.layers * kept.of(tokens=(tokens + text) / ranks)
    sound = 2 * HEARD * has_sound(model) / ranks
    return spec.layers * kept.of(tokens=tokens / ranks, text=text, samples=2, sound=sound)
