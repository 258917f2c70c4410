"""FLOPs of a network, counted from the network itself (count_work.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dit.config import Balance, DatasetConfig, ModelConfig
from dit.models.pass_work import PartWork, PassWork
from dit.models.registry import network_spec
from dit.sizing.inventory import alone

if TYPE_CHECKING:
    from dit.batch import PackedBatch


def forward_flops(
    model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()
) -> int:
    """FLOPs of one forward pass over samples (`PassWork.flops`).

    `tokens`, `text` and `sound` are the numbers of latent, text and sound tokens of each sample.
    """
    return pass_work(model).flops(tokens, text, sound)


def attention_flops(
    model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()
) -> int:
    """FLOPs of attention in the forward pass that `forward_flops` counts."""
    return pass_work(model).attention_flops(tokens, text, sound)


def pack_forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """FLOPs of one forward pass over the samples of `batch`, without padding.

    If `batch` has no token route, all layers see all tokens.
    """
    from dit.batch import SOUND  # late: scripts answer --help without torch

    if not batch.is_routed and model.token_route is not None:
        model = model.with_all_tokens()
    sound = batch.others[SOUND].num_tokens if SOUND in batch.others else ()
    tokens = model.attended_in(batch)
    return forward_flops(model, tokens=tokens, text=model.text_in(batch), sound=sound)


def training_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """FLOPs of forward and backward pass over `batch`: backward costs twice the forward pass."""
    return 3 * pack_forward_flops(model, batch)


def work_of_packs(model: ModelConfig, dataset: DatasetConfig) -> PassWork | None:
    """The work of packs by the lengths of samples; None if the loader does not balance packs."""
    if dataset.balance is Balance.NONE:
        return None
    # A route may begin or end at a resume, and a share of attention follows the step.
    return pass_work(model.with_all_tokens().at_step(0))


@lru_cache(maxsize=64)  # it is asked for at every pack
def pass_work(model: ModelConfig) -> PassWork:
    """Operations of a forward pass of `model` over all ranks, by the lengths of samples."""
    outside, layers, conditioner = _counted(alone(model))
    route = model.token_route
    inside = [route is not None and route.first <= at <= route.last for at in range(len(layers))]
    routed = [one for one, routes in zip(layers, inside, strict=True) if routes]
    others = [one for one, routes in zip(layers, inside, strict=True) if not routes]
    return PassWork(
        spec=network_spec(model),
        whole=sum(others, outside),
        routed=sum(routed, PartWork()),
        conditioner=conditioner,
        route=route,
    )


@lru_cache(maxsize=64)
def _counted(model: ModelConfig) -> tuple[PartWork, tuple[PartWork, ...], PartWork]:
    from dit.sizing.count_work import count_work  # Megatron-Core takes 4 s to import

    return count_work(model)
