"""HTML pages that need no server or network; the page of a dataset, with decoded pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import islice
from pathlib import Path

import safetensors.torch
from PIL import Image

from data_prep.inspect.read_shards import read_samples, shard_counts
from data_prep.refusals import printable
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.codecs.vae import Codec
from dit.safe_writing import write_atomically

_SHARDS, _SAMPLES = 20, 8  # shards that are shown, samples of each
_SIDE = 128  # pixels of a picture
_PHONE = '<meta name=viewport content="width=device-width, initial-scale=1">'
_STYLE = """\
:root{color-scheme:light dark}
body{font:15px/1.4 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;
overflow-wrap:break-word}
table{border-collapse:collapse;margin:.5em 0;display:block;overflow-x:auto}
td,th{padding:.15em .8em;text-align:left;border-bottom:1px solid #8885;vertical-align:top}
td.n{text-align:right}
i.bar{display:inline-block;height:.8em;background:#4a7ebb}
figure{display:inline-block;width:150px;margin:4px;vertical-align:top;font-size:11px;
overflow-wrap:anywhere}figure img{display:block;max-width:140px;min-width:64px;
image-rendering:pixelated}
"""


def write_inspection(folder: Path, path: Path) -> None:
    """Writes a page with the card and decoded pictures of the first samples of the first shards.

    Raises:
        PrepError: the folder is no dataset.
        CodecError: its card cannot be read, or its codec cannot be rebuilt.
    """
    card = read_card(folder)
    codec = vae.codec_of_card(card)
    facts = [(name, json.dumps(card.get(name))) for name in card if name != "sizes"]
    parts = [html_table(("card", ""), facts)]
    for name in islice(shard_counts(folder), _SHARDS):
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += _figures(folder / name, codec)
    write_html(path, folder.resolve().name, parts)


def _figures(shard: Path, codec: Codec) -> Iterator[str]:
    for _, key, files in islice(read_samples(shard), _SAMPLES):
        latent = safetensors.torch.load(files["safetensors"])["latent"]
        frames_FHWC = codec.decode(latent).numpy()
        about = json.loads(files["json"])
        shown = (frames_FHWC[0], frames_FHWC[-1])[: len(frames_FHWC)]
        pictures = "".join(picture(Image.fromarray(frame)) for frame in shown)
        text = f"{escape(key)}<br>{list(latent.shape)}<br>{escape(about['caption'][:200])}"
        yield f"<figure>{pictures}<figcaption>{text}</figcaption></figure>"


def write_html(path: Path, title: str, parts: Iterable[str]) -> None:
    """Writes a page of `parts`, which are HTML already."""
    head = f"<!doctype html><meta charset=utf-8>{_PHONE}<title>{escape(title)}</title>"
    body = "\n".join(parts)
    page = f"{head}<style>{_STYLE}</style><h1>{escape(title)}</h1>{body}\n"
    write_atomically(path, printable(page).encode())


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        number = " class=n" if isinstance(value, int | float) else ""
        return f"<td{number}>{escape(f'{value:,}' if number else str(value))}</td>"

    lines = ("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return (
        "<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
        + "".join(lines) + "</table>"
    )  # fmt: skip


def picture(image: Image.Image) -> str:
    """An image as HTML, scaled down."""
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "jpeg", quality=80)
    text = base64.b64encode(content.getvalue()).decode()
    return f"<img alt='' src='data:image/jpeg;base64,{text}'>"
