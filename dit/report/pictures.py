"""Pictures of the page: grids of samples over the steps, and pictures beside their prompts."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from dit.report.reading import ReportError, RunRecord

_STEPS = 24
"""Steps whose pictures a page carries, evenly spread, the last among them."""
_SIDE = 1600  # pixels: larger pictures are scaled down
_WHOLE = 300_000  # bytes: smaller files stand in the page as they are
_OF_A_STEP = 16


def slider(run: RunRecord) -> str:
    """The pictures of a run with a slider over the steps; empty where there are none."""
    steps = _spread(_steps(run.folder / "validation_generation"), _STEPS)
    if not steps:
        return ""
    last = len(steps) - 1
    shown = "".join(
        f"<div class=frame data-step={step}{'' if index == last else ' hidden'}>"
        + "".join(f'<img src="{uri(file)}" alt="samples at step {step}">' for file in files)
        + "</div>"
        for index, (step, files) in enumerate(steps)
    )
    bar = f"<input type=range min=0 max={last} value={last} aria-label=step>" if last else ""
    return (
        f"<figure class=slider><figcaption>{escape(run.name)},"
        f" <output>step {steps[-1][0]}</output></figcaption>{bar}{shown}</figure>"
    )


def _steps(folder: Path) -> list[tuple[int, list[Path]]]:
    """Steps and the pictures to show of each: grid.png, or the first pictures without one."""
    found = []
    for step in sorted(folder.glob("step_*")):
        number = re.fullmatch(r"step_(\d+)", step.name)
        files = sorted(step.rglob("grid.png")) or sorted(step.glob("*.png"))[:_OF_A_STEP]
        if number and files:
            found.append((int(number[1]), files))
    return sorted(found)


def _spread(items: list[Any], most: int) -> list[Any]:
    """At most so many of them, evenly spread, first and last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def uri(file: Path) -> str:
    """A picture as a URI that carries its bytes; a large one smaller, as WebP.

    Raises:
        ReportError: it is no picture.
    """
    from PIL import Image

    try:
        content, kind = file.read_bytes(), "png"
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if len(content) > _WHOLE:
                content, kind = _smaller(image), "webp"
    except (OSError, SyntaxError) as error:  # SyntaxError: Pillow's word for a broken PNG
        raise ReportError(f"{file} is no picture ({error}); remove it, or make it anew") from error
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _smaller(image: Any) -> bytes:
    image = image.convert("RGB")
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "webp", quality=85)
    return content.getvalue()


def generated(folder: Path) -> str:
    """Pictures of generate_dit beside their prompts, a line for each, and how they were made.

    Raises:
        ReportError: the folder has no samples.json, or it or a picture is damaged.
    """
    listing = folder / "samples.json"
    if not listing.is_file():
        raise ReportError(
            f"{listing} does not exist; --samples_dir wants generate_dit's output_dir"
        )
    try:
        samples = list(json.loads(listing.read_text()))
        rows = [(s["prompt"], s["seed"], folder / s["file"]) for s in samples]
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{listing} is damaged ({error!r}); generate again") from error
    lines = [_row(prompt, list(group)) for prompt, group in groupby(rows, key=lambda row: row[0])]
    made = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in _shared(samples))
    return (
        f"{''.join(lines)}<details><summary>How they were made</summary><dl>{made}</dl></details>"
    )


def _row(prompt: str, pictures: Sequence[tuple[str, int, Path]]) -> str:
    images = "".join(
        f'<img src="{uri(file)}" alt="{escape(prompt)}" title="seed {seed}">'
        for _, seed, file in pictures
        if file.suffix == ".png"
    )
    return f"<p class=prompt>{escape(prompt)}</p><div class=pictures>{images}</div>"


def _shared(samples: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What all pictures were made with alike: sampler, steps, guidance, checkpoint and so on."""
    own = {"file", "prompt", "seed"}
    first = samples[0].items() if samples else ()
    return [(k, v) for k, v in first if k not in own and all(s.get(k) == v for s in samples)]
