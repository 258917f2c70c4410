"""Anima's conditioner as a part of the network: what a sample holds for it."""

from __future__ import annotations

from dit.models.family import InputKind, SampleInput
from dit.token_ids import DIGITS, TOKEN_IDS

MOST_CONDITIONER_LAYERS = 64


def token_input(vocabulary: int, *, encoder: str) -> SampleInput:
    """The input with the tokens from which the conditioner starts, of `vocabulary` ids."""
    return SampleInput(
        name=TOKEN_IDS,
        kind=InputKind.TEXT,
        width=DIGITS,
        vocabulary=vocabulary,
        encoder=encoder,
    )
