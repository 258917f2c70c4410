"""Writes README.md of a dataset, for people, and sample pictures.

The section about permitted use is the user's: it is never overwritten.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.media.clips import Clip
from data_prep.media.images import to_levels
from data_prep.planning.statistics import crop_line
from data_prep.refusals import printable
from dit.progress import counted
from dit.safe_writing import write_atomically

README_NAME, SAMPLES_NAME = "README.md", "samples"
PICTURES = 4
_SIDE = 256  # pixels
_USE = "## What it may be used for\n"
_TO_BE_SAID = (
    "\n_To be filled in: what the licences and the people in these media permit, and what not._\n"
)
_NO_WORD = re.compile(r"[^\w ,.-]+")  # what would end the text of a picture in Markdown
_PACKAGES = ("megatron-dit", "torch", "diffusers", "transformers", "av", "pillow")


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeBy:
    """What a dataset's README has beyond its card: the command that made it, and pictures."""

    command: str = ""
    """Command line without paths and without options that do not change the samples."""
    pictures: tuple[tuple[str, bytes], ...] = ()
    """Caption and PNG file of some samples."""


def sample_picture(clip: Clip) -> bytes:
    """The first frame of `clip` as a PNG file, scaled down."""
    image = Image.fromarray(to_levels(clip.video_CFHW[:, :1])[0])
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "png")
    return content.getvalue()


def write_readme(folder: Path, card: Mapping[str, Any], made: MadeBy) -> None:
    """Writes README.md and `samples/` into `folder`; keeps the user's section on permitted use."""
    path = folder / README_NAME
    found = path.read_text(errors="replace") if path.exists() else ""
    said = re.search(re.escape(_USE) + r"(.*?)(?=^## |\Z)", found, re.DOTALL | re.MULTILINE)
    use = said[1] if said else _TO_BE_SAID + "\n"
    if made.pictures:
        (folder / SAMPLES_NAME).mkdir(exist_ok=True)
    for number, (_, content) in enumerate(made.pictures):
        write_atomically(folder / SAMPLES_NAME / f"{number}.png", content)
    parts = [_front(card), _facts(card), _USE + use.rstrip() + "\n", _made(card, made)]
    write_atomically(path, printable("\n".join([*parts, *_pictures(made)])).encode())


def _front(card: Mapping[str, Any]) -> str:
    licence = json.dumps(card.get("license") or "unknown")
    name = ", ".join(card.get("sources", ())) or "dataset"
    return f"---\nlicense: {licence}\ntags:\n- webdataset\n- latents\n---\n\n# {name}\n"


def _facts(card: Mapping[str, Any]) -> str:
    rows = [("licence", card.get("license") or "not stated (`--license`)")]
    for split, counts in card.get("splits", {}).items():
        found = f"{counts['samples']:,} in {counted(counts['shards'], 'shard')}"
        rows.append((f"samples in `{split}`", found))
    for one in card.get("sizes", ()):
        size = f"{one['width']} x {one['height']}"
        size += f", {one['num_frames']} frames" if one["num_frames"] > 1 else ""
        rows.append((f"of {size}", f"{one['samples']:,}"))
    rows += [(f"refused: {reason}", f"{n:,}") for reason, n in card.get("refused", {}).items()]
    if line := crop_line(card.get("cropped", {})):
        rows.append(("cropped", line))
    return _table("what", "value", rows)


def _made(card: Mapping[str, Any], made: MadeBy) -> str:
    rows = [("codec", _settings(card["processor"]))]
    rows.append(("text encoder", _settings(card["text_encoder"])))
    rows += [(f"version of {name}", found) for name in _PACKAGES if (found := _version(name))]
    call = f"\n```\n{made.command}\n```\n" if made.command else ""
    return (
        f"## How it was made\n{call}\n{_table('part', 'settings', rows)}\n"
        "`dataset_card.json` has all settings, and the normalisation of the latents.\n"
    )


def _pictures(made: MadeBy) -> list[str]:
    if not made.pictures:
        return []
    words = (_NO_WORD.sub(" ", caption)[:80] for caption, _ in made.pictures)
    shown = [f"![{text}]({SAMPLES_NAME}/{number}.png)" for number, text in enumerate(words)]
    return ["## Samples\n", "\n".join(shown) + "\n"]


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _table(head: str, other: str, rows: list[tuple[str, str]]) -> str:
    lines = (f"| {_cell(one)} | {_cell(two)} |" for one, two in rows)
    return f"| {head} | {other} |\n|---|---|\n" + "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
