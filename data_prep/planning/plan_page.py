"""The plan as an HTML page, with pictures and histograms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path

from PIL import Image

from data_prep.inspect.html_pages import html_table, picture, write_html
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
) -> PlanStatistics:
    """Writes the page and returns its statistics."""
    facts = PlanStatistics(
        text_tokens=text.length_of,
        latent_bytes=codec.channels * codec.patch**2 * _LATENT_BYTES,
        text_rows=text.rows_of,
        extra_bytes=codec.extra_bytes,
        text_bytes=text.width * _LATENT_BYTES,
        longest_text=text.max_length,
        judged_by=judged_by,
    )
    shown, step = [], max(1, plan.total // _PICTURES)
    for number, (line,) in enumerate(plan.blocks(1)):
        entry = Entry.from_line(line)
        facts.add(entry)
        if number % step == 0 and not entry.refused and len(shown) < _PICTURES:
            shown.append(entry)
    facts.finish()
    parts = [*_summary(facts), *_sizes(facts), *_histograms(facts), *_refused(facts)]
    parts += _ignored(source.ignored)
    parts += ["<h2>Samples</h2>", *(_figure(source, entry) for entry in shown)]
    write_html(path, "Plan", parts)
    return facts


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
        f"<td><i class=bar style='width:{300 * count / most:.0f}px'></i></td></tr>"
        for low, count in sorted(bins.items())
    )
    return f"<table>{rows}</table>"


def _refused(facts: PlanStatistics) -> Iterator[str]:
    if facts.refused:
        yield "<h2>Refused</h2>" + html_table(("reason", "samples"), facts.refused.most_common())
        rows = [(entry.source, entry.refused, entry.detail) for entry in facts.named]
        yield html_table(("file", "reason", "detail"), rows)


def _ignored(ignored: Mapping[str, int]) -> Iterator[str]:
    if ignored:
        yield "<h2>Ignored</h2>" + html_table(("what", "number"), list(ignored.items()))


def _figure(source: Source, entry: Entry) -> str:
    size, frames = entry.size or (0, 0), max(1, len(entry.keep))
    text = f"{escape(entry.source)}<br>{entry.width} x {entry.height} &rarr; {size[0]} x {size[1]}"
    text += f", {frames} frames, {entry.tokens} tokens<br>{escape(entry.caption[:200])}"
    return f"<figure>{_picture(source, entry)}<figcaption>{text}</figcaption></figure>"


def _picture(source: Source, entry: Entry) -> str:
    try:
        video_CFHW = source.read(replace(entry, keep=entry.keep[:1])).video_CFHW
    except RefusedError as refused:
        return escape(str(refused))
    levels_HWC = ((video_CFHW[:, 0].permute(1, 2, 0) + 1) * 127.5).byte().numpy()
    return picture(Image.fromarray(levels_HWC[..., 0] if levels_HWC.shape[2] == 1 else levels_HWC))
