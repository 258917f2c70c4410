"""Anima's conditioner as a part of the network: its inputs, and the memory that it keeps."""

from __future__ import annotations

from typing import Any

from dit.models.family import InputKind, SampleInput
from dit.models.layer_spec import Kept, KeptBy
from dit.token_ids import DIGITS, TOKEN_IDS

MOST_CONDITIONER_LAYERS = 64


def token_input(model: Any, *, encoder: str) -> SampleInput:
    """The input with the tokens from which the conditioner starts."""
    return SampleInput(
        name=TOKEN_IDS,
        kind=InputKind.TEXT,
        width=DIGITS,
        vocabulary=model.conditioner_vocabulary,
        encoder=encoder,
    )


def conditioner_kept(model: Any) -> KeptBy:
    """Numbers that autograd keeps of a conditioner's layer, three rows of them for the states."""
    width, made = model.conditioner_size, model.text_width
    inside = int(width * model.conditioner_mlp_ratio)
    ends = model.crossattn_emb_size + width + made * (1 if made == width else 2)
    numbers = model.conditioner_layers * (18 * width + 2 * inside) + ends
    both = Kept(outside=numbers / model.hidden_size)
    return KeptBy(fused=both, eager=both)
