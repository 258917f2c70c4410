"""The plan as an HTML page, with pictures and histograms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from data_prep.engine.block_worker import DecodedSample
from data_prep.inspect.duplicates import Duplicates
from data_prep.inspect.html_pages import Row, html_table, picture, write_html
from data_prep.media.clips import Entry, Source
from data_prep.planning.plan import PackingPlan
from data_prep.planning.statistics import CAPACITIES, Judged, PlanStatistics
from data_prep.refusals import RefusedError
from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec

_PICTURES = 60  # samples with a picture, evenly spread over the plan
_LATENT_BYTES = 2  # half precision


def write_plan_page(
    plan: PackingPlan,
    source: Source,
    path: Path,
    *,
    codec: Codec,
    text: TextEncoder,
    judged_by: Judged,
    decoded: Sequence[DecodedSample | None] | None = None,
) -> PlanStatistics:
    """Writes the page and returns its statistics.

    `decoded` has one for each line of the plan, None for a refused one; None where nothing was.
    """
    facts = PlanStatistics(
        text_tokens=text.length_of,
        latent_bytes=codec.channels * codec.patch**2 * _LATENT_BYTES,
        text_rows=text.rows_of,
        extra_bytes=codec.extra_bytes,
        text_bytes=text.width * _LATENT_BYTES,
        longest_text=text.max_length,
        judged_by=judged_by,
    )
    facts.duplicates.compared = decoded is not None
    for number, entry in enumerate(_entries(plan)):
        found = None if decoded is None else decoded[number]
        facts.add(entry if found is None else replace(entry, notes=found.notes))
        if not entry.refused:
            facts.duplicates.add(entry.source, entry.caption, found and found.looks)
    facts.finish()
    facts.duplicates.finish()
    parts = [*_summary(facts), *_sizes(facts), *_histograms(facts), *_refused(facts)]
    parts += [*_ignored(source.ignored), facts.duplicates.html()]
    write_html(path, "Plan", parts, _rows(plan, source, path.parent, facts.duplicates))
    return facts


def _entries(plan: PackingPlan) -> Iterator[Entry]:
    return (Entry.from_line(line) for (line,) in plan.blocks(1))


def _rows(plan: PackingPlan, source: Source, folder: Path, duplicates: Duplicates) -> list[Row]:
    """A row for each sample; some have a picture, and the others show their file."""
    rows, packed, step = list[Row](), 0, max(1, plan.total // _PICTURES)
    pictures = 0
    for number, entry in enumerate(_entries(plan)):
        row = _row(entry)
        if (file := source.file_of(entry)) is not None:
            row["file"] = quote(os.fsencode(os.path.relpath(file, folder)))
            row["video"] = entry.kind == "video"
        if not entry.refused:
            row["group"] = duplicates.group_of.get(packed, 0)
            row["repeats"] = duplicates.repeats_of(entry.caption)
            packed += 1
            if number % step == 0 and pictures < _PICTURES:
                row["picture"] = _picture(source, entry)
                pictures += 1
        rows.append(row)
    return rows


def _row(entry: Entry) -> Row:
    width, height = entry.size or (entry.width, entry.height)
    frames = max(1, len(entry.keep))
    bucket = f"{width} x {height}" + (f", {frames} frames" if frames > 1 else "")
    facts = f"{entry.width} x {entry.height} \N{RIGHTWARDS ARROW} {bucket}, {entry.tokens} tokens"
    row: Row = {"name": entry.source, "caption": entry.caption}
    if entry.refused:
        return row | {"refused": entry.refused, "detail": entry.detail}
    return row | {"bucket": bucket, "facts": facts}


def _summary(facts: PlanStatistics) -> Iterator[str]:
    yield f"<p>Files were judged by {escape(facts.judged_by)}.</p>"
    rows = [("samples in the shards", facts.samples), ("refused", facts.refused.total())]
    rows += [(f"of kind {kind}", count) for kind, count in facts.kinds.most_common()]
    rows += list(facts.notes.most_common())
    if facts.cut:
        rows.append((f"captions of more than {facts.longest_text} tokens, to be cut", facts.cut))
    rows += [("tokens", facts.tokens), ("expected bytes of the shards", round(facts.bytes))]
    yield html_table(("", ""), rows)
    packs = [
        (capacity, round(facts.fill(capacity), 3), facts.too_long(capacity))
        for capacity in CAPACITIES
    ]
    head = ("tokens in a pack", "part of it filled", "samples too long for it")
    yield "<h2>Packs</h2>" + html_table(head, packs)


def _sizes(facts: PlanStatistics) -> Iterator[str]:
    rows = [
        (f"{width} x {height}", frames, count)
        for (frames, height, width), count in facts.sizes.most_common(100)
    ]
    yield "<h2>Sizes (100 most frequent)</h2>"
    yield html_table(("width x height", "frames", "samples"), rows)


def _histograms(facts: PlanStatistics) -> Iterator[str]:
    for name, bins in facts.histograms.items():
        yield f"<h2>{escape(name.capitalize())}</h2>" + _bars(bins)


def _bars(bins: Mapping[float, int]) -> str:
    most = max(bins.values())
    rows = "".join(
        f"<tr><td class=n>{low:g} to {2 * low or 1:g}</td><td class=n>{count:,}</td>"
        f"<td><i class=bar style='width:{100 * count / most:.1f}%'></i></td></tr>"
        for low, count in sorted(bins.items())
    )
    return f"<table class=bars>{rows}</table>"


def _refused(facts: PlanStatistics) -> Iterator[str]:
    if facts.refused:
        yield "<h2>Refused</h2>" + html_table(("reason", "samples"), facts.refused.most_common())


def _ignored(ignored: Mapping[str, int]) -> Iterator[str]:
    if ignored:
        yield "<h2>Ignored</h2>" + html_table(("what", "number"), list(ignored.items()))


def _picture(source: Source, entry: Entry) -> str:
    try:
        video_CFHW = source.read(replace(entry, keep=entry.keep[:1])).video_CFHW
    except RefusedError:
        return ""  # the plan alone was read, and packing will say why
    levels_HWC = ((video_CFHW[:, 0].permute(1, 2, 0) + 1) * 127.5).byte().numpy()
    return picture(Image.fromarray(levels_HWC[..., 0] if levels_HWC.shape[2] == 1 else levels_HWC))
