"""Reads from shards the facts that a run is fitted to."""

# C F H W channels, frames, rows, columns of a latent

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dit.data.export.samples import SizeBucket

_LOOKED_AT = 256  # samples of the training split, evenly spread


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Facts about the training split of a dataset: sizes, captions, lengths of texts.

    Captions and texts are estimated from some of the samples.
    """

    folder: Path
    samples: int
    has_val: bool
    channels: int
    text_width: int
    text_rows: float
    """Mean number of text tokens of a caption."""
    shapes: tuple[tuple[int, int, int], ...]
    """Latent size of each sample: (frames, rows, columns), in cells."""
    held_out: tuple[tuple[int, int, int], ...] = ()
    """Latent sizes in the validation split, which the network must accept as well."""
    captions: float
    """Fraction of samples whose caption is unique."""
    side: float
    """Square root of the mean area of the pictures, in pixels."""
    colours: int | None
    """Colour channels (1 or 3) of latents of the codec without weights; None: latents of a VAE."""
    basis: str
    """What a latent cell of the codec without weights holds, such as pixels or dct; empty for a
    VAE."""

    @property
    def own_captions(self) -> bool:
        """Whether most samples have a unique caption."""
        return self.captions > 0.5

    @property
    def sizes(self) -> set[tuple[int, int, int]]:
        """Sizes of all latents, held-out ones included, since a run must accept them all."""
        return {*self.shapes, *self.held_out}

    @property
    def largest(self) -> tuple[int, int, int]:
        """The largest numbers of frames, rows and columns among all latents, in cells."""
        frames, rows, columns = zip(*self.sizes, strict=True)
        return max(frames), max(rows), max(columns)

    def lengths(self, patch: int) -> set[int]:
        """Numbers of tokens that a sample may have, with patches of `patch` rows and columns."""
        return {_tokens(size, patch) for size in self.sizes}

    def mean_length(self, patch: int) -> float:
        """Mean number of tokens of a training sample, with patches of `patch` rows and columns."""
        return sum(_tokens(shape, patch) for shape in self.shapes) / len(self.shapes)

    def divides(self, patch: int) -> bool:
        """Whether patches of `patch` rows and columns divide every latent."""
        return all(rows % patch == columns % patch == 0 for _, rows, columns in self.sizes)


def _tokens(shape: tuple[int, int, int], patch: int) -> int:
    frames, rows, columns = shape
    return frames * (rows // patch) * (columns // patch)


def read_corpus(folder: Path) -> Corpus:
    """The facts about the dataset in `folder`.

    Raises:
        DataError: the folder is not a dataset, or its training split has no captions.
    """
    # Imported late: fit_run.py answers --help without torch.
    from dit.data.export import ShardSamples
    from dit.data.rejections import DataError

    samples = ShardSamples(folder)
    count = len(samples)
    if not count:
        raise DataError(f"{folder} has no training samples; pack more, or use another --split")
    chosen = sorted({i * count // _LOOKED_AT for i in range(_LOOKED_AT)})
    read = [samples.read(i, whole=False) for i in chosen]
    text = samples.read(0, whole=True).record.text_LE
    if text is None:
        raise DataError(
            f"{folder} has samples without captions; pack the data with captions, which a run from"
            " scratch needs"
        )
    has_val = bool((samples.card.get("splits") or {}).get("val"))
    held_out = ShardSamples(folder, split="val").buckets if has_val else []
    shapes = [_shape(bucket) for bucket in samples.buckets]
    words = [str(one.about.get("caption", one.key)) for one in read]
    processor: Mapping[str, Any] = samples.card.get("processor") or {}
    is_pixel = processor.get("name") == "pixel"
    return Corpus(
        folder=folder,
        samples=count,
        has_val=has_val,
        channels=samples.buckets[0].latent[0],
        text_width=text.shape[1],
        text_rows=sum(one.text_rows for one in read) / len(read),
        shapes=tuple(shapes[number] for number in samples.bucket_of),
        held_out=tuple(map(_shape, held_out)),
        captions=sum(words.count(word) == 1 for word in words) / len(words),
        side=(sum(w * h for w, h in (one.size for one in read)) / len(read)) ** 0.5,
        colours=processor.get("pixel_channels") if is_pixel else None,
        basis=str(processor.get("basis", "pixels")) if is_pixel else "",
    )


def _shape(bucket: SizeBucket) -> tuple[int, int, int]:
    _, frames, rows, columns = bucket.latent
    return frames, rows, columns
