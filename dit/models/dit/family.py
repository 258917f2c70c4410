"""What the family `dit` says of itself; `dit.models.family` asks here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dit.models.dit.config import DitConfig
from dit.models.dit.stacks import dit_cost
from dit.models.family import (
    DiffusersForm,
    Family,
    InputKind,
    ObjectiveConventions,
    Padding,
    SampleInput,
    WeightRules,
)

if TYPE_CHECKING:
    from dit.models.positions import PositionRule


def _network() -> Callable[..., Any]:
    from dit.models.dit.model import DiT

    return DiT


def _diffusers() -> DiffusersForm:
    from dit.models.dit.diffusers import FORM

    return FORM


def _positions(model: DitConfig) -> PositionRule:
    from dit.models.positions import GridPositions

    return GridPositions(model.base_fps)


def _inputs(model: DitConfig) -> tuple[SampleInput, ...]:
    zeros = model.text_pad_to is not None
    text = SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        padding=Padding.ZEROS if zeros else Padding.NONE,
        length=model.text_pad_to,
        encoder="cosmos",
    )
    return (text,)


FAMILY = Family(
    name="dit",
    config=DitConfig,
    network=_network,
    cost=dit_cost,
    parts={
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "mlp": "mlp",
        "modulate_self": "modulation",
        "modulate_cross": "modulation",
        "modulate_mlp": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=_diffusers,
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(
        # Each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2), and the output
        # of the network as 0.
        zero=("*proj_out.weight", "*modulate*linear_2*"),
        no_decay=("*pos_emb_*",),
    ),
    objective=ObjectiveConventions(),
    vae="cosmos",
)
