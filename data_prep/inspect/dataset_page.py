"""Writes the page of a dataset: its card, decoded samples, refused samples and duplicates."""

# C latent channels; F H W frames, rows, columns of the latent, or of pixels with C colours

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch

from data_prep.inspect.duplicates import ComparedBy, Duplicates
from data_prep.inspect.html_pages import (
    PAGE_BYTES,
    PageRoom,
    Row,
    Thumbnail,
    beside_rejected,
    frames_shown,
    html_table,
    seconds_of,
    side_for,
    thumbnail,
    with_controls,
    write_html,
)
from data_prep.inspect.read_shards import InspectedSample, ShardReport, read_samples
from data_prep.media.clips import REJECTED_LATENT
from data_prep.writing.dataset_folder import REFUSED_NAME
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.codecs.sound import SoundCodec, sound_codec_of_card
from dit.codecs.sound.sound_part import read_sound
from dit.codecs.text.encoder import WORDS
from dit.codecs.vae import Codec
from dit.parsing import parse_json
from dit.progress import Track, no_progress

_DECODING_S = 300.0  # seconds in which a network may decode pictures for the page
_SIZE = ("width", "height", "num_frames", "samples")
_LIST = 6  # longer lists of numbers are shown by their range


class ShownCodecs(NamedTuple):
    """The codecs that decode the pictures and the sound of a dataset for its page."""

    video: Codec
    sound: SoundCodec | None


def duplicates_in(reports: Sequence[ShardReport], by: ComparedBy) -> Duplicates:
    """Finds near duplicates and repeated captions among all samples in the shards of `reports`.

    `by` says whether the hashes in `reports` are of pixels or of latents.
    """
    found = Duplicates(by=by)
    for report in reports:
        for one in report.seen:
            found.add(one.source, one.caption, one.looks)
    found.finish()
    return found


def write_inspection(
    folder: Path,
    path: Path,
    reports: Sequence[ShardReport],
    duplicates: Duplicates,
    *,
    track: Track = no_progress,
) -> None:
    """Writes the page of the dataset in `folder` to `path`.

    The page shows as many decoded samples as its size limit (`PAGE_BYTES`) and the time limit for
    decoding (`_DECODING_S`) allow. `track` shows the progress.

    Raises:
        CodecError: the card cannot be read, or its codec cannot be rebuilt.
    """
    card = read_card(folder)
    refused = list(_refused(folder))
    codecs = ShownCodecs(vae.codec_of_card(card), sound_codec_of_card(card))
    rows, note = _rows(folder, reports, duplicates, codecs, track)
    own = {name: card[name] for name in card if name not in ("sizes", "refused", WORDS)}
    sizes = [[one.get(name) for name in _SIZE] for one in card.get("sizes") or []]
    parts = [f"<details><summary>Card</summary>{html_table(('', ''), _facts(own))}</details>"]
    parts += ["<h2>Sizes (100 most frequent)</h2>", html_table(_SIZE, sizes[:100])]
    if words := (card.get(WORDS) or {}).get("counts"):
        table = html_table(("word", "in training captions"), words.items())
        parts.append(f"<details><summary>Words of the captions</summary>{table}</details>")
    if refused:
        counts = Counter(row["refused"] for row in refused)
        parts += ["<h2>Refused</h2>", html_table(("reason", "samples"), counts.most_common())]
    parts += [duplicates.html(), f"<p>{note}</p>"]
    write_html(path, folder.resolve().name, parts, [*rows, *refused])


def _rows(
    folder: Path,
    reports: Sequence[ShardReport],
    duplicates: Duplicates,
    codecs: ShownCodecs,
    track: Track,
) -> tuple[list[Row], str]:
    """Returns (rows, note): a row for each sample, and a sentence on how many have pictures."""
    rows, room = list[Row](), PageRoom()
    samples, end = sum(len(report.seen) for report in reports), time.monotonic() + _DECODING_S
    with track("decoding pictures", samples, 0) as advance:
        for number, report in enumerate(reports):
            # Each shard gets an equal part of the time that is left.
            begun, shards = time.monotonic(), len(reports) - number
            until = None if codecs.video.is_exact else begun + (end - begun) / shards
            shown = dict(_pictures(folder, report, codecs, room, side_for(samples), until))
            for one in report.seen:
                pictures = shown[one.key].row if one.key in shown else {}
                rows.append(_row(report, one, len(rows), duplicates) | pictures)
            advance(len(report.seen))
    note = f"{room.shown:,} of {samples:,} samples have decoded pictures."
    if room.shown < samples:
        note += f" A page shows at most {PAGE_BYTES / 1e6:.0f} MB of pictures, a network decodes"
        note += f" for {_DECODING_S / 60:.0f} minutes, and damaged shards are not decoded."
    return rows, note


def _row(report: ShardReport, one: InspectedSample, number: int, duplicates: Duplicates) -> Row:
    shape = ", ".join(map(str, one.shape))
    return {
        "name": one.source,
        "caption": one.caption,
        "bucket": one.bucket,
        "facts": f"{one.key}, {report.name}, [{shape}]",
        "group": duplicates.group_of.get(number, 0),
        "repeats": duplicates.repeats_of(one.caption),
    }


def _facts(card: dict[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Yields the (name, value) pairs of a card, also of its nested objects.

    Empty values are left out. A long list is replaced by its length and the range of its numbers.
    """
    for name, value in card.items():
        if isinstance(value, dict):
            yield from _facts(value, f"{above}{name}, ")
        elif isinstance(value, list) and len(value) > _LIST:
            numbers = [one for one in value if isinstance(one, int | float)]
            span = f", {min(numbers):.4g} to {max(numbers):.4g}" if numbers else ""
            yield f"{above}{name}", f"{len(value)} values{span}"
        elif value not in (None, []):
            yield f"{above}{name}", value if isinstance(value, str) else json.dumps(value)


def _refused(folder: Path) -> Iterator[Row]:
    """Yields a row of the page for each line of the dataset's `refused.jsonl`, if it exists."""
    path = folder / REFUSED_NAME
    for line in path.read_bytes().splitlines() if path.exists() else ():
        about: Any = parse_json(line)
        yield {
            "name": str(about.get("source")),
            "caption": "",
            "refused": str(about.get("reason")),
            "detail": str(about.get("detail")),
        }


def reference_names(tensors: Iterable[str]) -> list[str]:
    """The names in `tensors` that are latents of control pictures or videos, sorted."""
    return sorted(name for name in tensors if name.startswith("reference_latent_"))


def _pictures(
    folder: Path,
    report: ShardReport,
    codecs: ShownCodecs,
    room: PageRoom,
    side: int,
    until: float | None,
) -> Iterator[tuple[str, Thumbnail]]:
    """Decodes samples of a shard and yields (key, thumbnail) of each, while the page has room.

    It yields nothing for a damaged shard. It stops after the time `until` of the monotonic clock,
    if that is not None.
    """
    if report.problems:
        return
    codec = codecs.video
    for _, key, files in read_samples(folder / report.name):
        about: dict[str, Any] = parse_json(files["json"])
        tensors = safetensors.torch.load(files["safetensors"])
        frames_FHW3 = codec.decode(tensors["latent"]).numpy()
        count = len(frames_FHW3)
        seconds = seconds_of(count, about.get("fps"))
        controls = [codec.decode(tensors[name]).numpy() for name in reference_names(tensors)]
        shown_FHW3 = with_controls(frames_FHW3[frames_shown(count)], controls)
        if REJECTED_LATENT in tensors:
            rejected_FHW3 = codec.decode(tensors[REJECTED_LATENT]).numpy()
            shown_FHW3 = beside_rejected(shown_FHW3, rejected_FHW3)
        shown = thumbnail(shown_FHW3, side=side, seconds=seconds)
        if codecs.sound is not None and (sound := read_sound(files, about)) is not None:
            shown = shown.with_sound(
                sound.waveform(codecs.sound).numpy(), codecs.sound.decoded_rate
            )
        found = room.take(shown)
        if found is None:
            return
        yield key, found
        if until is not None and time.monotonic() > until:
            return
