"""Anima's conditioner as a part of the network: what it keeps, and what a sample holds for it."""

from __future__ import annotations

from typing import Any

from dit.models.family import InputKind, SampleInput
from dit.models.layer_spec import Kept, KeptBy
from dit.token_ids import DIGITS, TOKEN_IDS

MOST_CONDITIONER_LAYERS = 64


def token_input(model: Any, *, encoder: str) -> SampleInput:
    """The tokens that the conditioner starts from, beside the states that they attend to."""
    return SampleInput(
        name=TOKEN_IDS,
        kind=InputKind.TEXT,
        width=DIGITS,
        vocabulary=model.conditioner_vocabulary,
        encoder=encoder,
    )


def conditioner_kept(model: Any) -> KeptBy:
    """Of a layer what norms, attentions and MLP read and make, three rows of them of the states."""
    width, made = model.conditioner_size, model.text_width
    inside = int(width * model.conditioner_mlp_ratio)
    ends = model.crossattn_emb_size + width + made * (1 if made == width else 2)
    numbers = model.conditioner_layers * (18 * width + 2 * inside) + ends
    both = Kept(outside=numbers / model.hidden_size)
    return KeptBy(fused=both, eager=both)
