"""Shows pictures on the page: samples over the steps, and pictures with their prompts.

Each prompt stands beneath its pictures, which fill the width of the window.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from dit.parsing import parse_json
from dit.report.reading import ReportError, RunRecord
from dit.system_errors import explained
from dit.watching import CELLS, NotShown, watching

STEPS = 24
"""Most steps of a run whose pictures are shown; they are evenly spaced, and include the newest."""
_SIDE = 1600  # pixels; larger pictures are scaled down
_WHOLE = 300_000  # bytes; smaller files are embedded unchanged
_SMALL = 8_000  # bytes; larger pictures of a grid are embedded as WebP
_WIDTHS = (72, 140)  # pixels of a picture on the page
_MOST_VIDEO = 8_000_000  # bytes
_MOST_PICTURES = 16  # of a step without a grid
_WITHOUT = "without_adapter"  # folder of the samples without the adapter, beside those with it


def slider(runs: Sequence[RunRecord], undrawn: list[NotShown], *, most: int = STEPS) -> str:
    """HTML of the pictures of all runs with one slider; empty without pictures.

    The slider covers the steps of all runs, at most `most` of each; a run shows the pictures of its
    latest step up to the chosen one. Files that are not pictures are added to `undrawn`.
    """
    found = {run.name: _frames(run, undrawn, most=most) for run in runs}
    steps = sorted({step for frames in found.values() for step, _ in frames})
    if not steps:
        return ""
    last = len(steps) - 1
    # Hidden until page.js runs: without it nothing would move.
    bar = (
        f"<input type=range min=0 max={last} value={last} aria-label=step hidden"
        f' data-steps="{" ".join(map(str, steps))}">'
    )
    shown = "".join(_of_run(name, frames) for name, frames in found.items() if frames)
    return f"<div class=slider>{bar if last else ''}<div class=sliders>{shown}</div></div>"


def _frames(run: RunRecord, undrawn: list[NotShown], *, most: int) -> list[tuple[int, str]]:
    """(step, HTML of its pictures) of at most `most` steps of a run."""
    steps = _spread(_steps(run.folder / "validation_generation"), most)
    images = [
        (step, "".join(_shown(file, undrawn, said=_said(step, file)) for file in files))
        for step, files in steps
    ]
    return [(step, shown) for step, shown in images if shown]


def _of_run(name: str, frames: list[tuple[int, str]]) -> str:
    newest = frames[-1][0]
    shown = "".join(
        f"<div class=frame data-step={step}{'' if step == newest else ' hidden'}>{images}</div>"
        for step, images in frames
    )
    return (
        f'<figure class=frames data-run="{escape(name)}"><figcaption>{escape(name)},'
        f" step <output>{newest:,}</output></figcaption>{shown}</figure>"
    )


def _said(step: int, file: Path) -> str:
    said = f"samples at step {step:,}"
    if file.parent.name == _WITHOUT:
        return f"{said}, without the adapter"
    paired = file.name == "grid.png" and (file.parent / _WITHOUT).is_dir()
    return f"{said}, without the adapter and with it" if paired else said


def _steps(folder: Path) -> list[tuple[int, list[Path]]]:
    """(step, files to show) of each step folder in `folder`, in their order.

    The files are grid.png, or the first pictures if there is no grid. If a sample was also
    generated without the adapter, the picture without it precedes that with it.
    """
    found = []
    for step in sorted(folder.glob("step_*")):
        number = re.fullmatch(r"step_(\d+)", step.name)
        pictures = [*step.glob("*.png"), *step.glob(f"{_WITHOUT}/*.png")]
        pictures.sort(key=lambda file: (file.name, file.parent.name != _WITHOUT))
        files = sorted(step.rglob("grid.png")) or pictures[:_MOST_PICTURES]
        if number and files:
            found.append((int(number[1]), files))
    return sorted(found)


def _spread(items: list[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _shown(file: Path, undrawn: list[NotShown], *, said: str) -> str:
    if file.name == "grid.png":
        with watching(str(file), []):  # what is wrong with the file is said below
            return _of_grid(file)
    return _image(file, undrawn, alt=said)


Cell = tuple[str, str, int]
"""(prompt, HTML of a picture, width of the picture in pixels)."""


def _of_grid(file: Path) -> str:
    """HTML of the pictures of the grid `file` above their prompts.

    It raises an error of any type if the file's list of pictures is missing or wrong.
    """
    if not file.is_file():  # reading a pipe would wait for ever
        raise FileNotFoundError
    with Image.open(file) as image:
        named, whole = parse_json(image.info[CELLS]), image.convert("RGB")
    cells = list[Cell]()
    for one in named["cells"]:
        left, top, right, bottom = one["box"]
        if not (0 <= left < right <= whole.width and 0 <= top < bottom <= whole.height):
            raise ValueError
        source, alt = _embedded(whole.crop((left, top, right, bottom))), escape(one["prompt"])
        cells.append((one["prompt"], f'<img src="{source}" alt="{alt}">', right - left))
    title = f"<p>{escape(named['title'])}</p>" if named["title"] else ""
    return f"{title}{_prompts(cells)}"


def _embedded(image: Any) -> str:
    """`image` as a data URI: PNG, or WebP if the PNG file is large."""
    content, kind = io.BytesIO(), "png"
    image.save(content, kind)
    if content.tell() > _SMALL:
        content, kind = io.BytesIO(), "webp"
        image.save(content, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"


def _prompts(cells: Sequence[Cell]) -> str:
    """HTML of pictures above their prompts; adjacent pictures with one prompt are grouped."""
    figures = []
    for prompt, group in groupby(cells, key=lambda cell: cell[0]):
        images, widths = zip(*((image, width) for _, image, width in group), strict=True)
        size = min(max(*widths, _WIDTHS[0]), _WIDTHS[1])
        shown = f"<div class=pictures>{''.join(images)}</div>"
        said = f"<figcaption class=prompt>{escape(prompt)}</figcaption>"
        style = f"--count:{len(images)};--size:{size}px"
        figures.append(f'<figure style="{style}">{shown}{said}</figure>')
    return f"<div class=prompts>{''.join(figures)}</div>"


def _image(file: Path, undrawn: list[NotShown], *, alt: str, title: str = "") -> str:
    """An <img> with the content of `file`; empty if the file is not a picture.

    `undrawn` then gets a notice.
    """
    kind = source = ""
    # Pillow raises many types for damaged files: OSError, SyntaxError, struct.error, and its own.
    with watching(str(file), undrawn):
        source, white = _source(file)
        kind = " class=paper" if white and file.name == "grid.png" else ""
    words = f' title="{escape(title)}"' if title else ""
    return source and f'<img{kind} src="{source}" alt="{escape(alt)}"{words}>'


def _video(file: Path, undrawn: list[NotShown], *, alt: str, title: str, wave: str = "") -> str:
    """A <video> with the content of `file`; empty, with a notice in `undrawn`, if it is not MP4.

    It is also empty if the file is too large for a page. `wave` is the name of a picture of its
    sound in the same folder, which is shown below it.
    """
    source = ""
    with watching(str(file), undrawn):
        if not file.is_file():
            raise FileNotFoundError(
                "it does not exist, or is not a regular file; generate it again"
            )
        if file.stat().st_size > _MOST_VIDEO:
            raise ValueError(
                f"it has {file.stat().st_size:,} bytes, and a page takes videos of at most"
                f" {_MOST_VIDEO:,}; generate a smaller one"
            )
        content = file.read_bytes()
        if content[4:8] != b"ftyp":  # each MP4 begins with it
            raise ValueError("it is not an MP4 file; generate it again")
        source = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    words = f'aria-label="{escape(alt)}" title="{escape(title)}"'
    muted = "" if wave else " muted"
    shown = f'<video controls loop{muted} preload=metadata src="{source}" {words}></video>'
    drawn = _image(file.with_name(wave), undrawn, alt=f"waveform: {alt}") if wave else ""
    return source and shown + drawn


def _source(file: Path) -> tuple[str, bool]:
    """(data URI, whether the corners are white) of a picture; a large file is scaled down, as WebP.

    Raises:
        OSError: the file does not exist.
    """
    if not file.is_file():  # reading a pipe would wait for ever
        raise FileNotFoundError("it does not exist, or is not a regular file; generate it again")
    content = file.read_bytes()
    with Image.open(file) as image:
        whole, kind = image.convert("RGBA"), "webp" if image.format == "WEBP" else "png"
    corners = {whole.getpixel((x, y)) for x in (0, whole.width - 1) for y in (0, whole.height - 1)}
    if len(content) > _WHOLE:
        content, kind = _smaller(whole), "webp"
    data = base64.b64encode(content).decode()
    return f"data:image/{kind};base64,{data}", corners == {(255, 255, 255, 255)}


def _smaller(image: Any) -> bytes:
    image.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    image.save(content, "webp", quality=85)
    return content.getvalue()


def generated(folder: Path, undrawn: list[NotShown]) -> str:
    """HTML of the pictures that generate_dit wrote into `folder`, with their prompts.

    A file that is not a picture is added to `undrawn`.

    Raises:
        ReportError: the folder has no samples.json, or it is damaged.
    """
    listing = folder / "samples.json"
    if not listing.is_file():
        raise ReportError(
            f"{listing} does not exist; give --samples_dir the --output_dir of generate_dit.py"
        )
    try:
        samples = _samples(parse_json(listing.read_bytes()))
    except (ValueError, OSError) as error:
        raise ReportError(f"{listing} is damaged ({explained(error)}); generate again") from error
    cells = [
        (one["prompt"], _sample(folder, one, undrawn), _number(one.get("width"))) for one in samples
    ]
    made = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in _shared(samples))
    return (
        f"{_prompts(cells)}<details><summary>How they were made</summary><dl>{made}</dl></details>"
    )


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _samples(content: Any) -> list[dict[str, Any]]:
    """The entries of samples.json in `content`, after they were checked.

    Raises:
        ValueError: an entry has no prompt, or names a file outside the folder.
    """
    if not isinstance(content, list):
        raise ValueError(f"it holds a {type(content).__name__}, not a list of samples")
    for number, one in enumerate(content):
        said = [one.get(key) for key in ("prompt", "file")] if isinstance(one, dict) else []
        if not said or not all(isinstance(text, str) for text in said) or "seed" not in one:
            raise ValueError(f"entry {number} has no prompt, file or seed")
        if Path(one["file"]).name != one["file"]:
            raise ValueError(
                f"entry {number} names {one['file']!r:.100}, a file outside the folder"
            )
    return content


def _sample(folder: Path, one: dict[str, Any], undrawn: list[NotShown]) -> str:
    file, said = folder / one["file"], {"alt": one["prompt"], "title": f"seed {one['seed']}"}
    if not one["file"].endswith(".mp4"):
        return _image(file, undrawn, **said)
    wave = one.get("waveform")
    if not isinstance(wave, str) or Path(wave).name != wave:  # no such file name
        wave = ""
    return _video(file, undrawn, **said, wave=wave)


def _shared(samples: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    own = {"file", "prompt", "seed", "waveform", "wav"}
    first = samples[0].items() if samples else ()
    return [(k, v) for k, v in first if k not in own and all(s.get(k) == v for s in samples)]
