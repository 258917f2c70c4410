"""Writes the plan as an HTML page, with pictures and histograms."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from data_prep.engine.block_worker import BlockWorker, DecodedSample
from data_prep.inspect.duplicates import ComparedBy, Duplicates
from data_prep.inspect.html_pages import (
    Row,
    Thumbnail,
    beside_rejected,
    html_table,
    side_for,
    thumbnail,
    with_controls,
    write_html,
)
from data_prep.media.clips import Entry, Source
from data_prep.media.images import to_levels
from data_prep.planning.plan import PackingPlan
from data_prep.planning.statistics import CAPACITIES, Judged, PlanStatistics, crop_line
from data_prep.refusals import RefusedError

_PICTURES = 60  # samples of a quick plan with a picture, evenly spread over it
_LATENT_BYTES = 2  # half precision


def write_plan_page(
    plan: PackingPlan,
    work: BlockWorker,
    path: Path,
    *,
    cropped: Mapping[str, Any],
    decoded: Sequence[DecodedSample | None] | None = None,
) -> PlanStatistics:
    """Writes the page of `plan` to `path`, and returns its statistics.

    `work` has the source and the codecs, and `cropped` is the summary of `CropStatistics`.
    `decoded` has an entry for each line of the plan, None for refused ones; it is None after a
    quick plan.
    """
    codec, text, source = work.codec, work.text, work.source
    facts = PlanStatistics(
        text_tokens=text.length_of,
        latent_bytes=codec.channels * codec.patch**2 * _LATENT_BYTES,
        text_rows=text.rows_of,
        extra_bytes=codec.extra_bytes,
        text_bytes=text.width * _LATENT_BYTES,
        longest_text=text.max_length,
        judged_by=Judged.HEADERS if decoded is None else Judged.DECODING,
        cropped=cropped,
        patch=codec.patch,
        stride=codec.stride,
        sound=work.sound,
    )
    if decoded is None:
        facts.duplicates.by = ComparedBy.NOTHING
    for number, entry in enumerate(plan.entries):
        one = decoded[number] if decoded else None
        facts.add(entry if one is None else replace(entry, notes=one.notes))
        for _ in range(0 if entry.refused else entry.repeats):
            facts.duplicates.add(entry.source, entry.caption, one and one.looks)
    facts.duplicates.finish()
    parts = [*_sums(facts), *_lists(facts, source.ignored), facts.duplicates.html()]
    rows = _rows(plan, source, path.parent, facts.duplicates)
    for number, one in _thumbnails(plan, work, decoded):
        rows[number] |= one.row
    parts.append(_about_pictures(rows, quick=decoded is None))
    write_html(path, "Plan", parts, rows)
    return facts


def _rows(plan: PackingPlan, source: Source, folder: Path, duplicates: Duplicates) -> list[Row]:
    """A row of the page for each sample of the plan, without its picture."""
    rows, packed = list[Row](), 0
    for entry in plan.entries:
        row = _row(entry)
        if (file := source.file_of(entry)) is not None:
            row["file"] = quote(os.fsencode(os.path.relpath(file, folder)))
        if not entry.refused:
            row["group"] = duplicates.group_of.get(packed, 0)
            row["repeats"] = duplicates.repeats_of(entry.caption)
            packed += entry.repeats
        rows.append(row)
    return rows


def _thumbnails(
    plan: PackingPlan, work: BlockWorker, decoded: Sequence[DecodedSample | None] | None
) -> Iterator[tuple[int, Thumbnail]]:
    """Yields (index in the plan, thumbnail) of the samples whose picture the page shows.

    After a quick plan, when `decoded` is None, the first frames of some samples are decoded here.
    """
    if decoded is not None:
        for number, one in enumerate(decoded):
            if one is not None and one.thumbnail is not None:
                yield number, one.thumbnail
        return
    for number, entry in enumerate(plan.entries):
        if number % math.ceil(plan.total / _PICTURES) == 0 and not entry.refused:
            with suppress(RefusedError):  # a quick plan reads only headers; packing will say why
                clip = work.source.read(_of_first_frame(entry))
                controls = map(to_levels, clip.references)
                first_1HW3 = with_controls(to_levels(clip.video_CFHW[:, :1]), controls)
                if clip.rejected_CFHW is not None:
                    first_1HW3 = beside_rejected(first_1HW3, to_levels(clip.rejected_CFHW))
                shown = thumbnail(first_1HW3, side=side_for(_PICTURES), seconds=0)
                if work.sound is not None and clip.sound_CS is not None:
                    shown = shown.with_sound(clip.sound_CS.numpy(), work.sound.rate)
                yield number, shown


def _of_first_frame(entry: Entry) -> Entry:
    controls = tuple(replace(one, keep=one.keep[:1]) for one in entry.references)
    rejected = entry.rejected and replace(entry.rejected, keep=entry.rejected.keep[:1])
    return replace(entry, keep=entry.keep[:1], references=controls, rejected=rejected)


def _about_pictures(rows: Sequence[Row], *, quick: bool) -> str:
    shown = sum("picture" in row for row in rows)
    packed = sum("refused" not in row for row in rows)
    text = "Pictures show what will be in the shards; the name of a sample opens its file."
    if shown < packed:
        why = "--plan=quick decodes no others" if quick else "a page has no room for more"
        text += f" {shown:,} of {packed:,} samples have a picture: {why}."
    return f"<p>{text}</p>"


def _row(entry: Entry) -> Row:
    width, height = entry.size or (entry.width, entry.height)
    frames = max(1, len(entry.keep))
    bucket = f"{width} x {height}" + (f", {frames} frames" if frames > 1 else "")
    facts = f"{entry.width} x {entry.height} \N{RIGHTWARDS ARROW} {bucket}, {entry.tokens} tokens"
    row: Row = {"name": entry.source, "caption": entry.caption}
    if entry.refused:
        return row | {"refused": entry.refused, "detail": entry.detail}
    return row | {"bucket": bucket, "facts": facts}


def _sums(facts: PlanStatistics) -> Iterator[str]:
    yield f"<p>Files were judged by {escape(facts.judged_by)}.</p>"
    rows = [("samples in the shards", facts.samples), ("refused", len(facts.refusals))]
    rows += [(f"of kind {kind}", count) for kind, count in facts.kinds.most_common()]
    rows += list(facts.notes.most_common())
    if facts.cut:
        rows.append((f"captions of more than {facts.longest_text} tokens, to be cut", facts.cut))
    rows += [
        (f"tokens, {facts.token}", facts.tokens),
        ("expected bytes of the shards", round(facts.bytes)),
    ]
    if facts.sound is not None:
        rows.append((f"seconds of sound, at {facts.sound.rate:,} Hz", round(facts.seconds)))
    yield html_table(("", ""), rows)
    yield f"<p>{escape(crop_line(facts.cropped))}</p>"
    packs = [
        (capacity, round(facts.fill(capacity), 3), facts.too_long(capacity))
        for capacity in CAPACITIES
    ]
    head = ("tokens in a pack", "part of it filled", "samples too long for it")
    yield "<h2>Packs</h2>" + html_table(head, packs)


def _lists(facts: PlanStatistics, ignored: Mapping[str, int]) -> Iterator[str]:
    rows = [
        (f"{width} x {height}", frames, count)
        for (frames, height, width), count in facts.sizes.most_common(100)
    ]
    yield "<h2>Sizes (100 most frequent)</h2>"
    yield html_table(("width x height", "frames", "samples"), rows)
    for name, bins in facts.histograms.items():
        yield f"<h2>{escape(name.capitalize())}</h2>" + _bars(bins)
    if facts.refusals:
        table = html_table(("reason", "samples"), facts.refusals.counts.items())
        yield f"<h2>Refused</h2>{table}"
    if ignored:
        yield "<h2>Ignored</h2>" + html_table(("what", "number"), ignored.items())


def _bars(bins: Mapping[float, int]) -> str:
    most = max(bins.values())
    rows = "".join(
        f"<tr><td class=n>{low:g} to {2 * low or 1:g}</td><td class=n>{count:,}</td>"
        f"<td><i class=bar style='width:{100 * count / most:.1f}%'></i></td></tr>"
        for low, count in sorted(bins.items())
    )
    return f"<table class=bars>{rows}</table>"
