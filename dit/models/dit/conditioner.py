"""Anima's conditioner as a part of the network: what a sample holds for it."""

from __future__ import annotations

from typing import Any

from dit.models.family import InputKind, SampleInput
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
