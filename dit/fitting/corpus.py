"""Shards -> what a run is fitted to."""

# C F H W channels, frames, rows, columns of a latent

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit.data.export import ShardSamples
from dit.data.rejections import DataError

_LOOKED_AT = 256  # samples of the training split, evenly spread


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The training split of a dataset, judged by some of its samples."""

    folder: Path
    samples: int
    has_val: bool
    channels: int
    text_width: int
    text_rows: float
    """On average."""
    shapes: tuple[tuple[int, int, int], ...]
    """Frames, rows and columns of the latents that were looked at."""
    captions: float
    """The part of them with a caption that no other one has."""
    side: float
    """Pixels: the root of the mean area."""
    colours: int | None
    """Of the codec without weights; None for latents of a VAE."""
    basis: str
    """What its cells hold."""

    @property
    def own_captions(self) -> bool:
        """Whether most samples have a caption that no other one has."""
        return self.captions > 0.5

    @property
    def largest(self) -> tuple[int, int, int]:
        """Most frames, rows and columns of a latent."""
        frames, rows, columns = zip(*self.shapes, strict=True)
        return max(frames), max(rows), max(columns)

    def tokens(self, patch: int) -> list[int]:
        """Tokens of each sample that was looked at."""
        return [
            frames * (rows // patch) * (columns // patch) for frames, rows, columns in self.shapes
        ]

    def divides(self, patch: int) -> bool:
        """Whether every latent divides into patches of this side."""
        return all(rows % patch == columns % patch == 0 for _, rows, columns in self.shapes)


def read_corpus(folder: Path) -> Corpus:
    """What the shards in `folder` hold.

    Raises:
        DataError: it is no dataset, or its training split has no captions.
    """
    samples = ShardSamples(folder)
    count = len(samples)
    if not count:
        raise DataError(f"{folder} has no training samples; pack more, or use another --split")
    chosen = sorted({i * count // _LOOKED_AT for i in range(_LOOKED_AT)})
    read = [samples.read(i, whole=False) for i in chosen]
    text = samples.read(0, whole=True).record.text_LE
    if text is None:
        raise DataError(f"{folder} has samples without captions; a run from scratch needs them")
    latents = [tuple(one.record.latent_CFHW.shape) for one in read]
    words = [str(one.about.get("caption", one.key)) for one in read]
    processor: Mapping[str, Any] = samples.card.get("processor") or {}
    is_pixel = processor.get("name") == "pixel"
    return Corpus(
        folder=folder,
        samples=count,
        has_val=bool((samples.card.get("splits") or {}).get("val")),
        channels=latents[0][0],
        text_width=text.shape[1],
        text_rows=sum(one.text_rows for one in read) / len(read),
        shapes=tuple((f, h, w) for _, f, h, w in latents),
        captions=sum(words.count(word) == 1 for word in words) / len(words),
        side=(sum(w * h for w, h in (one.size for one in read)) / len(read)) ** 0.5,
        colours=processor.get("pixel_channels") if is_pixel else None,
        basis=str(processor.get("basis", "pixels")) if is_pixel else "",
    )
