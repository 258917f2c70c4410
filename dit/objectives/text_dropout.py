"""Text dropout for classifier-free guidance (arXiv:2207.12598).

Some samples train with the null text instead of their caption.
"""

# L text tokens of the whole pack, E text width, N samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dit.batch import PackedBatch


def draw_text_dropout(count: int, probability: float, rng: torch.Generator) -> list[bool]:
    """Whether each of `count` samples trains with the null text; `rng` is a CPU generator."""
    return (torch.rand(count, generator=rng, dtype=torch.float64) < probability).tolist()


def with_texts(batch: PackedBatch, texts: Sequence[Tensor]) -> PackedBatch:
    """The same pack with other captions: `texts` has one [L, E] for each sample.

    Raises:
        ValueError: a caption without tokens, of another width, or not one for each sample.
    """
    if len(texts) != batch.num_samples:
        raise ValueError(f"{len(texts)} captions for a pack of {batch.num_samples} samples")
    width = batch.text_LE.shape[1]
    for text_LE in texts:
        if text_LE.ndim != 2 or text_LE.shape[0] < 1 or text_LE.shape[1] != width:
            raise ValueError(
                f"text embedding of shape {tuple(text_LE.shape)} in a pack of text width {width}:"
                f" give [L, {width}] with L >= 1, from the text encoder that packed the dataset"
            )
    starts = tuple(accumulate((len(text_LE) for text_LE in texts), initial=0))
    text_LE = torch.cat([text_LE.to(batch.text_LE) for text_LE in texts])
    return replace(batch, text_LE=text_LE, text_starts=starts)


def with_null_text(
    batch: PackedBatch, dropped: Sequence[bool], null_text_LE: Tensor
) -> PackedBatch:
    """The same pack, the captions of the dropped samples replaced by the null text [L0, E].

    Lengths are Python integers, so this does not wait for the device.

    Raises:
        ValueError: the null text has no tokens or another width than the captions.
    """
    spans = zip(dropped, pairwise(batch.text_starts), strict=True)
    texts = [null_text_LE if drop else batch.text_LE[a:b] for drop, (a, b) in spans]
    return with_texts(batch, texts)
