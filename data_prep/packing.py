"""A source of clips -> a dataset folder.

1. check     keys, splits and output folder, before anything is read
2. fit       the processor sees each clip once, if it wants to
3. encode    clip -> sample -> shard of its split; refusals are counted
4. publish   only if enough was packed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.cards import FORMAT_VERSION
from data_prep.clips import Clip, Entry, Source
from data_prep.folder import REFUSED_NAME, make_empty, publish
from data_prep.processors import Processor
from data_prep.processors.processor import LATENT_DTYPE
from data_prep.refusals import PrepError, Reason, Refusals, RefusedError
from data_prep.shards import ShardSeries, sample_parts
from data_prep.splits import Split, SplitFractions, position_of
from data_prep.text import TextEncoder

SIZES_IN_CARD = 20  # most frequent sizes; generation takes the first where none is asked for

# Passes entries through and shows how many have gone by.
Track = Callable[[Sequence[Entry], str], Iterable[Entry]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """How samples become a folder; none of it changes what a sample holds."""

    split: SplitFractions
    shard_size: int
    """Samples in one shard, at most."""
    max_shard_bytes: int
    """Bytes of one shard, at most, unless a single sample is larger."""
    max_bad_fraction: float
    """Part of the files that may be refused."""
    overwrite: bool

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise PrepError(f"--shard_size {self.shard_size} must be at least 1 sample")
        if self.max_shard_bytes < 1:
            raise PrepError(f"--max_shard_bytes {self.max_shard_bytes} must be at least 1 byte")
        if not 0 <= self.max_bad_fraction <= 1:
            raise PrepError(f"--max_bad_fraction {self.max_bad_fraction} must lie in 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What one run packed and what it left out."""

    shards: Mapping[Split, Mapping[str, int]]  # samples of each shard by file name
    bytes_written: int
    refused: Mapping[str, int]  # by reason
    ignored: Mapping[str, int]  # files that are no media, by kind
    notes: Mapping[str, int]


def pack(
    source: Source,
    folder: Path,
    *,
    processor: Processor,
    text: TextEncoder,
    options: PackOptions,
    settings: Mapping[str, Any],
    track: Track = lambda entries, _: entries,
) -> Summary:
    """Packs all of `source` into `folder`; `settings` go into the card as they are.

    Raises:
        PrepError: something must be changed; as after any exception, there is no `.nv-meta`.
    """
    entries = _in_packing_order(source.entries, options.split)
    make_empty(folder, overwrite=options.overwrite)
    refusals, notes, sizes = Refusals(), Counter(), Counter()

    def clips(activity: str) -> Iterator[tuple[Entry, Clip]]:
        return _readable(source, track(entries, activity), refusals)

    def check() -> None:
        refusals.write(folder / REFUSED_NAME)
        refusals.check(total=len(entries), max_fraction=options.max_bad_fraction)

    processor = processor.fitted(clip.video_CFHW for _, clip in clips("reading"))
    check()
    with ExitStack() as stack:
        series = {split: stack.enter_context(_series(folder, split, options)) for split in Split}
        for entry, parts, clip in _samples(clips("packing"), refusals, processor, text):
            series[options.split.split_of(entry.key)].write(entry.key, parts)
            notes.update(clip.notes)
            sizes.update([tuple(clip.video_CFHW.shape[1:])])
    check()
    options.split.check(entry.key for entry in entries if entry.source not in refusals)
    shards = {split: done.counts for split, done in series.items() if done.counts}
    card = _card(source, processor, text, shards, refusals, settings)
    card["sizes"] = [
        {"num_frames": frames, "height": height, "width": width, "samples": count}
        for (frames, height, width), count in sizes.most_common(SIZES_IN_CARD)
    ]
    publish(folder, shards=shards, card=card, null_text_LE=text.encode(""))
    return Summary(
        shards=shards,
        bytes_written=sum(done.bytes_written for done in series.values()),
        refused=refusals.counts,
        ignored=source.ignored,
        notes=notes,
    )


def _in_packing_order(entries: Sequence[Entry], split: SplitFractions) -> list[Entry]:
    """Scattered by a hash, so that no shard is all of one folder, and the same every time."""
    sources: dict[str, str] = {}
    for entry in entries:
        other = sources.setdefault(entry.key, entry.source)
        if other != entry.source:
            raise PrepError(f"{other} and {entry.source} get the same key {entry.key}; rename one")
    split.check(sources)
    return sorted(entries, key=lambda entry: (position_of(entry.key), entry.key))


def _readable(
    source: Source, entries: Iterable[Entry], refusals: Refusals
) -> Iterator[tuple[Entry, Clip]]:
    for entry in entries:
        if entry.source in refusals:
            continue
        try:
            clip = source.read(entry)
        except RefusedError as refused:
            refusals.add(entry.source, refused)
            continue
        yield entry, clip


def _samples(
    clips: Iterable[tuple[Entry, Clip]],
    refusals: Refusals,
    processor: Processor,
    text: TextEncoder,
) -> Iterator[tuple[Entry, dict[str, bytes], Clip]]:
    """Entry and files of each clip that encodes, and the clip."""
    for entry, clip in clips:
        try:
            parts = encode(entry, clip, processor=processor, text=text)
        except RefusedError as refused:
            refusals.add(entry.source, refused)
            continue
        yield entry, parts, clip


def _series(folder: Path, split: Split, options: PackOptions) -> ShardSeries:
    return ShardSeries(
        folder / split, max_samples=options.shard_size, max_bytes=options.max_shard_bytes
    )


def encode(
    entry: Entry, clip: Clip, *, processor: Processor, text: TextEncoder
) -> dict[str, bytes]:
    """The files of one sample.

    Raises:
        RefusedError: its latent is not finite.
    """
    latent_CFHW = processor.encode(clip.video_CFHW)
    if not torch.isfinite(latent_CFHW).all():
        raise RefusedError(
            Reason.NOT_FINITE, f"processor {processor.name} made it from {entry.source}"
        )
    _, frames, height, width = clip.video_CFHW.shape
    description = {
        "format_version": FORMAT_VERSION,
        "caption": clip.caption,
        "source": entry.source,
        "original_height": clip.original_height,
        "original_width": clip.original_width,
        "height": height,
        "width": width,
        "num_frames": frames,
        "fps": clip.fps,
        "processor": processor.name,
        "text_encoder": text.name,
        "text_encoder_revision": text.revision,
        "latent_mean": processor.whitening.mean,
        "latent_std": processor.whitening.std,
    }
    return sample_parts({"latent": latent_CFHW, "text": text.encode(clip.caption)}, description)


def _card(
    source: Source,
    processor: Processor,
    text: TextEncoder,
    shards: Mapping[Split, Mapping[str, int]],
    refusals: Refusals,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "processor": {"name": processor.name, **processor.settings},
        "text_encoder": text.settings,
        "latent": {
            "channels": processor.channels,
            "dtype": str(LATENT_DTYPE).removeprefix("torch."),
            "mean": processor.whitening.mean,
            "std": processor.whitening.std,
        },
        "splits": {
            str(split): {"samples": sum(counts.values()), "shards": len(counts)}
            for split, counts in shards.items()
        },
        "sources": [source.name],
        "refused": refusals.counts,
        "settings": dict(settings),
        "license": None,
    }
