"""A network on torch's meta device, whose tensors have no values, and packs for it.

Nothing is sent: the process groups are stand-ins, which know only their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor, nn

from dit.batch import TEXT, LatentSample, PackedBatch
from dit.config import ModelConfig
from dit.data.pack import pack_samples
from dit.distributed.process_groups import run_megatron_on_cpu
from dit.models.family import InputKind
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of
from dit.pack_wire import pack_to
from dit.token_ids import as_digits

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class StandInGroup:
    """A process group that knows only its size and this process's rank."""

    ranks: int = 1
    number: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def stage_on_meta(model: ModelConfig, *, stage: int = 0, stages: int = 1) -> Any:
    """A pipeline stage of a network without values, on the first tensor rank of `model`."""
    run_megatron_on_cpu()
    model = replace(model, pipeline_model_parallel_size=stages)  # layers are numbered by it
    one = StandInGroup()
    groups = SimpleNamespace(
        tp=StandInGroup(model.tensor_model_parallel_size),
        cp=one,
        pp=StandInGroup(stages, stage),
        dp=one,
        dp_cp=one,
        embd=None,
        pos_embd=None,
    )
    build: Any = family_of(model).network()
    with groups_as_given(), META:
        network: nn.Module = build(model, groups)
        return network.to(META)


@contextmanager
def groups_as_given() -> Iterator[None]:
    """A context in which Megatron-Core's linears use the group that they are given.

    If no process group was started, they would assume one rank.
    """
    whole = "get_tensor_model_parallel_group_if_none"
    given: list[tuple[Any, str, Any]] = [
        (layers, whole, lambda group, **_: group),
        (layers, "get_pg_size", lambda group: group.size()),
        (layers, "get_pg_rank", lambda group: group.rank()),
        (mappings, whole, lambda group, **_: group),
    ]
    with replaced(given):
        yield


@contextmanager
def replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which these attributes of modules have these values."""
    own = [(module, name, getattr(module, name)) for module, name, _ in attributes]
    for module, name, value in attributes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in own:
            setattr(module, name, value)


def meta_pack(model: ModelConfig, *, side: int, text: int, samples: int) -> PackedBatch:
    """A pack on the meta device of equal samples: one frame of `side` x `side` tokens, `text` rows.

    They have only required inputs; `text` is ignored if the network fixes it.
    """
    family = family_of(model)
    inputs = family.inputs(model)
    tall, wide = model.patch_temporal, model.patch_spatial
    size = (tall, side * wide, side * wide)
    text = next((one.rows for one in inputs if one.name == TEXT and one.rows), text)
    others: dict[str, Tensor] = {}
    for one in inputs:
        if one.kind is InputKind.CHANNELS:
            others[one.name] = torch.zeros(one.width, *size)
        elif one.vocabulary is not None:
            others[one.name] = as_digits(torch.zeros(text, dtype=torch.int64))
        elif one.kind is InputKind.TEXT and one.name != TEXT:
            others[one.name] = torch.zeros(one.rows or (0 if one.may_be_empty else 1), one.width)
        elif one.kind is InputKind.VECTOR:
            others[one.name] = torch.zeros(one.width)
    sample = LatentSample(
        key="",
        latent_CFHW=torch.zeros(model.in_channels, *size),
        text_LE=torch.zeros(text, model.crossattn_emb_size),
        fps=math.nan,
        others=others,
    )
    layout = PatchLayout(
        patch_temporal=tall,
        patch_spatial=wide,
        sample_multiple=model.attended_multiple,
        positions=family.positions(model),
        inputs=inputs,
        attended=model.attended,
        clean_level=family.objective.clean_level,
        guidance=family.guidance(model),
    )
    batch = pack_to(pack_samples([sample] * samples, layout), META)
    if not family.tells_step_end(model):
        return batch
    return replace(batch, step_end_N=torch.empty(samples, device=META))
