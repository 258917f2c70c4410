"""The plan as one page: what becomes of the files, with pictures and histograms."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from PIL import Image

from data_prep.clips import Entry, Source
from data_prep.files import write_whole
from data_prep.planning.facts import CAPACITIES, Facts
from data_prep.planning.plan import Plan
from data_prep.processors import Processor
from data_prep.refusals import RefusedError
from data_prep.text import TextEncoder

_PICTURES = 60  # samples that are shown, evenly spread over the plan
_SIDE = 128  # pixels
_CELLS = 4  # latent cells in a token
_LATENT_BYTES = 2  # half precision
_STYLE = """\
body{font:15px/1.4 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.15em .8em;text-align:left;
border-bottom:1px solid #ddd;vertical-align:top}td.n{text-align:right}
i.bar{display:inline-block;height:.8em;background:#4a7ebb}
figure{display:inline-block;width:150px;margin:4px;vertical-align:top;font-size:11px;
overflow-wrap:anywhere}figure img{display:block;max-width:140px}
"""


def write_page(
    plan: Plan, source: Source, path: Path, *, processor: Processor, text: TextEncoder
) -> Facts:
    """Writes the page and returns what it is about."""
    facts = Facts(
        text_tokens=text.length_of,
        latent_bytes=processor.channels * _CELLS * _LATENT_BYTES,
        text_bytes=text.width * _LATENT_BYTES,
    )
    shown, step = [], max(1, plan.total // _PICTURES)
    for number, (line,) in enumerate(plan.blocks(1)):
        entry = Entry.from_line(line)
        facts.add(entry)
        if number % step == 0 and not entry.refused and len(shown) < _PICTURES:
            shown.append(entry)
    facts.finish()
    parts = [*_summary(facts), *_sizes(facts), *_histograms(facts), *_refused(facts)]
    parts += ["<h2>Samples</h2>", *(_figure(source, entry) for entry in shown)]
    page = f"<!doctype html><meta charset=utf-8><title>Plan</title><style>{_STYLE}</style>"
    write_whole(path, (page + "<h1>Plan</h1>" + "\n".join(parts) + "\n").encode())
    return facts


def _table(
    head: Sequence[str], rows: Iterator[Sequence[object]] | Sequence[Sequence[object]]
) -> str:
    def cell(value: object) -> str:
        number = " class=n" if isinstance(value, int | float) else ""
        return f"<td{number}>{escape(f'{value:,}' if number else str(value))}</td>"

    lines = ("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return (
        "<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
        + "".join(lines) + "</table>"
    )  # fmt: skip


def _summary(facts: Facts) -> Iterator[str]:
    rows = [("samples in the shards", facts.samples), ("refused", facts.refused.total())]
    rows += [(f"of kind {kind}", count) for kind, count in facts.kinds.most_common()]
    rows += [(f"caption from {where}", count) for where, count in facts.captions.most_common()]
    rows += [("tokens", facts.tokens), ("expected bytes of the shards", round(facts.bytes))]
    yield _table(("", ""), rows)
    packs = [
        (capacity, round(facts.fill(capacity), 3), facts.too_long(capacity))
        for capacity in CAPACITIES
    ]
    head = ("tokens in a pack", "part of it filled", "samples too long for it")
    yield "<h2>Packs</h2>" + _table(head, packs)


def _sizes(facts: Facts) -> Iterator[str]:
    rows = [
        (f"{width} x {height}", frames, count)
        for (frames, height, width), count in facts.sizes.most_common(100)
    ]
    yield "<h2>Sizes (100 most frequent)</h2>"
    yield _table(("width x height", "frames", "samples"), rows)


def _histograms(facts: Facts) -> Iterator[str]:
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


def _refused(facts: Facts) -> Iterator[str]:
    if facts.refused:
        yield "<h2>Refused</h2>" + _table(("reason", "samples"), facts.refused.most_common())
        rows = [(entry.source, entry.refused, entry.detail) for entry in facts.named]
        yield _table(("file", "reason", "detail"), rows)


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
    image = Image.fromarray(levels_HWC[..., 0] if levels_HWC.shape[2] == 1 else levels_HWC)
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "jpeg", quality=80)
    text = base64.b64encode(content.getvalue()).decode()
    return f"<img alt='' src='data:image/jpeg;base64,{text}'>"
