"""A network on torch's meta device, whose tensors have no values, and packs for it.

Substitutes for the process groups have only sizes, and nothing is communicated.
"""

# T tokens of a rank, W of all ranks, X any width

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from dit.batch import (
    TEXT,
    LatentSample,
    NoisyTokens,
    PackedBatch,
    SequenceShard,
    StepEnd,
    TokenStream,
)
from dit.config import ModelConfig
from dit.data.pack import pack_samples
from dit.distributed.process_groups import run_megatron_on_cpu
from dit.models.family import InputKind, SampleInput
from dit.models.layers import context_parallel, queries_and_keys
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.pack_wire import pack_to
from dit.sizing.cuda_kernels import META, RingAttention
from dit.token_ids import as_digits

Stream = TypeVar("Stream", bound=TokenStream)


@dataclass(frozen=True, slots=True)
class StandInGroup:
    """A process group that has only a size and this process's rank."""

    ranks: int = 1
    number: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def stage_on_meta(model: ModelConfig, *, stage: int = 0, stages: int = 1) -> StackedTransformer:
    """Pipeline stage `stage` of `stages` of a network on the meta device, on tensor rank 0."""
    run_megatron_on_cpu()
    model = replace(model, pipeline_model_parallel_size=stages)  # layers are numbered by it
    one = StandInGroup()
    groups = SimpleNamespace(
        tp=StandInGroup(model.tensor_model_parallel_size),
        cp=StandInGroup(model.context_parallel_size),
        pp=StandInGroup(stages, stage),
        dp=one,
        dp_cp=one,
        embd=None,
        pos_embd=None,
    )
    build: Any = family_of(model).network()
    with groups_as_given(), META:
        network: StackedTransformer = build(model, groups)
        return network.to(META)


@contextmanager
def groups_as_given() -> Iterator[None]:
    """A context in which Megatron-Core's linears use the group that they get, and send nothing.

    Without a process group Megatron-Core would assume one rank. Collectives return tensors of the
    size that the real ones would return.
    """
    whole = "get_tensor_model_parallel_group_if_none"
    given: list[tuple[Any, str, Any]] = [
        (layers, whole, lambda group, **_: group),
        (layers, "get_pg_size", lambda group: group.size()),
        (layers, "get_pg_rank", lambda group: group.rank()),
        (mappings, whole, lambda group, **_: group),
        (mappings, "_reduce", lambda x, _: x),
        (mappings, "_gather_along_first_dim", partial(_gathered, dim=0)),
        (mappings, "_gather_along_last_dim", partial(_gathered, dim=-1)),
        (queries_and_keys, "_summed", lambda x, _: x.clone()),
        (context_parallel, "all_to_all", lambda _, x: x.clone()),
        (context_parallel, "check_ring", lambda _: None),
        (context_parallel, "_ring", lambda *_: _in_ring),
    ]
    with replaced(given):
        yield


def _in_ring(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
    return RingAttention.apply(q, k, v)


def _gathered(x: Tensor, group: Any, *_: Any, dim: int) -> Tensor:
    return x if group.size() == 1 else torch.cat([x] * group.size(), dim=dim)


@contextmanager
def replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which attributes have other values.

    `attributes` are triples (object, name of its attribute, value in the context).
    """
    own = [(module, name, getattr(module, name)) for module, name, _ in attributes]
    for module, name, value in attributes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in own:
            setattr(module, name, value)


def meta_pass(network: StackedTransformer, batch: PackedBatch) -> None:
    """Runs a forward pass of the stage `network` over `batch`, which is on the meta device."""
    if not network.pre_process:
        dtype = network.config.params_dtype
        shape: Any = {"size": network.hidden_shape(batch), "device": META, "dtype": dtype}
        before = torch.empty(**shape, requires_grad=torch.is_grad_enabled())
        network.set_input_tensor([before])
    with groups_as_given():
        network(batch.latent_TC.float(), torch.empty(batch.num_levels, device=META), batch)


def text_rows(model: ModelConfig) -> int:
    """Number of text tokens of a sample in packs for measuring; the network takes twice as many."""
    most = (one.most_rows for one in family_of(model).inputs(model))
    return min([64, *(rows // 2 for rows in most if rows is not None)])


def meta_pack(  # noqa: PLR0913  # each is a size of the samples
    model: ModelConfig,
    *,
    side: int,
    text: int,
    samples: int,
    frames: int = 1,
    sound: int = 0,
    references: bool = False,
    share: SequenceShard | None = None,
) -> PackedBatch:
    """A meta pack of equal samples of `frames` x `side` x `side` tokens with `text` tokens each.

    With networks of sound each sample has `sound` sound tokens. Samples have the inputs that the
    network requires, and also its references if `references` is set. If the network fixes the
    number of text rows, `text` is not used. If `share` is given, the pack is this shard of a
    context rank.
    """
    family = family_of(model)
    inputs = family.inputs(model)
    tall, wide = model.patch_temporal, model.patch_spatial
    size = (frames * tall, side * wide, side * wide)
    text = next((one.rows for one in inputs if one.name == TEXT and one.rows), text)
    sample = LatentSample(
        key="",
        latent_CFHW=torch.zeros(model.in_channels, *size),
        text_LE=torch.zeros(text, model.crossattn_emb_size),
        fps=math.nan,
        others=_others(inputs, size, text=text, references=references, sound=sound),
    )
    layout = PatchLayout(
        patch_temporal=tall,
        patch_spatial=wide,
        sample_multiple=math.lcm(model.attended_multiple, 1 if share is None else share.count),
        positions=family.positions(model),
        inputs=inputs,
        attended=model.attended,
        clean_level=family.objective.clean_level,
        guidance=family.guidance(model),
    )
    batch = pack_samples([sample] * samples, layout)
    if share is not None:
        others = {n: _shared(stream, share) for n, stream in batch.others.items()}
        batch = replace(batch, others=others)
        batch = _shared(batch, share)
    batch = pack_to(batch, META)
    if batch.others:
        batch = replace(batch, others={n: _fed(s) for n, s in batch.others.items()})
    if not family.tells_step_end(model):
        return batch
    return batch.with_method(StepEnd(level_N=torch.empty(samples, device=META)))


def _others(
    inputs: Sequence[SampleInput],
    size: tuple[int, int, int],
    *,
    text: int,
    references: bool,
    sound: int,
) -> dict[str, Tensor]:
    """Zeros, by name, for the inputs that samples need besides text and latent.

    `size` is (frames, rows, columns) in latent cells; `text` and `sound` are numbers of tokens.
    """
    others: dict[str, Tensor] = {}
    for one in inputs:
        if one.kind is InputKind.CHANNELS or (one.kind is InputKind.REFERENCE and references):
            others[one.name] = torch.zeros(one.width, *size)
        elif one.vocabulary is not None:
            others[one.name] = as_digits(torch.zeros(text, dtype=torch.int64))
        elif one.kind is InputKind.TEXT and one.name != TEXT:
            others[one.name] = torch.zeros(one.rows or (0 if one.may_be_empty else 1), one.width)
        elif one.kind is InputKind.VECTOR:
            others[one.name] = torch.zeros(one.width)
        elif one.kind is InputKind.SOUND and sound:
            others[one.name] = torch.zeros(one.width, sound)
    return others


def _shared(stream: Stream, share: SequenceShard) -> Stream:
    """A copy of `stream` with the tokens of one context rank."""
    return replace(stream.with_tokens(stream.rows(share)), share=share)


def _fed(stream: TokenStream) -> TokenStream:
    """A copy of the sound stream `stream` with a noisy input, on the meta device."""
    level_M = torch.empty(stream.num_levels, device=META)
    return stream.with_method(NoisyTokens(input_TC=stream.latent_TC.float(), level_M=level_M))
