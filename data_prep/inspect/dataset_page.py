"""The page of a dataset: its card, decoded pictures and clips, what was refused and repeats."""

# C latent channels; F H W frames, rows, columns of the latent, or of pixels with C colours

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import safetensors.torch
from PIL import Image

from data_prep.inspect.duplicates import Duplicates
from data_prep.inspect.html_pages import Row, clip, html_table, picture, write_html
from data_prep.inspect.read_shards import ShardReport, read_samples
from data_prep.writing.dataset_folder import REFUSED_NAME
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.codecs.text.vocabulary import WORDS
from dit.codecs.vae import Codec
from dit.parsing import parse_json

_SHARDS, _SAMPLES = 20, 8  # shards that are shown in pictures, samples of each
_SIZE = ("width", "height", "num_frames", "samples")
_LIST = 6  # longer lists of numbers are shown by their range
_FPS = 16.0  # of a clip that does not say it


def duplicates_in(reports: Sequence[ShardReport]) -> Duplicates:
    """What comes more than once in a dataset; latents are compared, without decoding them."""
    found = Duplicates()
    for report in reports:
        for one in report.seen:
            found.add(one.source, one.caption, one.looks)
    found.finish()
    return found


def write_inspection(
    folder: Path, path: Path, reports: Sequence[ShardReport], duplicates: Duplicates
) -> None:
    """Writes the page; the first samples of the first shards are decoded.

    Raises:
        CodecError: the card cannot be read, or its codec cannot be rebuilt.
    """
    card = read_card(folder)
    codec = vae.codec_of_card(card)
    rows, refused = list[Row](), list(_refused(folder))
    for number, report in enumerate(reports):
        pictures = {}
        if number < _SHARDS and not report.problems:
            pictures = dict(_pictures(folder / report.name, codec))
        for one in report.seen:
            sample = len(rows)
            about = {"picture": "", "clip": "", **pictures.get(one.key, {})}
            shape = ", ".join(map(str, one.shape))
            rows.append(
                {
                    "name": one.source,
                    "caption": one.caption,
                    "bucket": one.bucket,
                    "facts": f"{one.key}, {report.name}, [{shape}]",
                    "group": duplicates.group_of.get(sample, 0),
                    "repeats": duplicates.repeats_of(one.caption),
                    **{name: value for name, value in about.items() if value},
                }
            )
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
    note = f"<p>Of the first {_SHARDS} shards, the first {_SAMPLES} samples have pictures.</p>"
    parts += [duplicates.html(), note]
    write_html(path, folder.resolve().name, parts, [*rows, *refused])


def _facts(card: dict[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Names and values of a card; of a long list of numbers, its range."""
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
    """Those that packing refused; none where there is no such list."""
    path = folder / REFUSED_NAME
    for line in path.read_bytes().splitlines() if path.exists() else ():
        about: Any = parse_json(line)
        yield {
            "name": str(about.get("source")),
            "caption": "",
            "refused": str(about.get("reason")),
            "detail": str(about.get("detail")),
        }


def _pictures(shard: Path, codec: Codec) -> Iterator[tuple[str, Row]]:
    for _, key, files in islice(read_samples(shard), _SAMPLES):
        latent_CFHW = safetensors.torch.load(files["safetensors"])["latent"]
        frames_FHWC = codec.decode(latent_CFHW).numpy()
        found = {"picture": picture(Image.fromarray(frames_FHWC[0]))}
        if len(frames_FHWC) > 1:
            fps = parse_json(files["json"]).get("fps") or _FPS
            found["clip"] = clip(frames_FHWC, fps=fps)
        yield key, found
