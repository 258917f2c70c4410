"""Captions filled up with zeros, which published weights of several families attend to."""

from __future__ import annotations

from itertools import pairwise

import torch

from dit.batch import TEXT, PackedBatch


def padded_rows(batch: PackedBatch, length: int | None) -> int:
    """Rows of all captions of a pack, filled up to `length` each (null: as they are)."""
    return batch.text_starts[-1] if length is None else length * batch.num_samples


def pad_text(batch: PackedBatch, length: int | None) -> PackedBatch:
    """Appends zero vectors to every caption up to `length` tokens (null: leaves them alone).

    The published weights of Cosmos and of Wan attend to this padding.

    Raises:
        ValueError: a caption is longer.
    """
    if length is None:
        return batch
    parts, width = [], batch.text_LE.shape[-1]
    for sample, (start, stop) in enumerate(pairwise(batch.text_starts)):
        missing = length - (stop - start)
        if missing < 0:
            raise ValueError(
                f"the caption of sample {batch.keys[sample]!r} has {stop - start} tokens, more than"
                f" model.text_pad_to={length}; raise it, or encode shorter captions"
            )
        parts += [batch.text_LE[start:stop], batch.text_LE.new_zeros(missing, width)]
    starts = tuple(range(0, length * batch.num_samples + 1, length))
    return batch.with_text(TEXT, torch.cat(parts), starts)
