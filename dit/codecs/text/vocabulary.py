"""The words of a dataset's captions, which its card keeps, and those of prompts beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from dit.codecs.text.encoder import TextEncoder

MOST_WORDS = 10_000
"""Words that a card keeps, the most frequent ones."""
WORDS = "words"
"""Their key in a card."""


def vocabulary(captions: Iterable[str], encoder: TextEncoder) -> dict[str, Any]:
    """How many different words captions have, and how often the most frequent ones stand there.

    It is empty where the encoder tells no words apart.
    """
    counts = Counter(chain.from_iterable(map(encoder.words_of, captions)))
    if not counts:
        return {}
    frequent = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MOST_WORDS]
    return {WORDS: {"distinct": len(counts), "counts": dict(frequent)}}


def unknown_words(
    prompts: Iterable[str], encoder: TextEncoder, card: Mapping[str, Any]
) -> str | None:
    """A sentence about the words of prompts that no caption had; None where all had them.

    Cards of encoders that tell no words apart, and those of earlier versions, have no list.
    """
    listed = card.get(WORDS) or {}
    known = listed.get("counts") or {}
    asked = dict.fromkeys(chain.from_iterable(map(encoder.words_of, prompts)))
    unknown = [word for word in asked if word not in known]
    if not known or not unknown:
        return None
    words = ", ".join(unknown)
    if listed["distinct"] > len(known):
        return f"not among the {len(known):,} most frequent words of the training data: {words}"
    return f"words that no caption of the training data has: {words}"
