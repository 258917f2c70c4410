"""Files of generated pictures: PNG or MP4 for each, a grid of all, samples.json."""

# F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def make_folder(folder: Path) -> None:
    """Makes the folder for the files: better to fail now than after the sampling.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder} cannot be written ({error}); choose a folder that you may"
            " write to"
        ) from error


def write(
    pictures: Sequence[np.ndarray],
    prompts: Sequence[str],
    *,
    folder: Path,
    seed: int,
    settings: Mapping[str, Any],
) -> Path:
    """Writes every picture (PNG) or video (MP4), grid.png and samples.json; returns the grid.

    `settings` go into samples.json and the PNGs as they are; `fps` among them is that of a video.
    """
    entries = []
    for i, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        name = f"{i:05d}.png" if len(picture) == 1 else f"{i:05d}.mp4"
        if len(picture) == 1:
            _write_png(folder / name, picture[0], prompt, {"seed": seed + i, **settings})
        else:
            _write_mp4(folder / name, picture, fps=settings["fps"])
        entries.append({"file": name, "prompt": prompt, "seed": seed + i, **settings})
    grid = folder / "grid.png"
    draw_grid(pictures, prompts, grid)
    (folder / "samples.json").write_text(json.dumps(entries, indent=1) + "\n")
    return grid


def _write_png(
    path: Path, picture_HW3: np.ndarray, prompt: str, settings: Mapping[str, Any]
) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("prompt", prompt)
    note.add_text("settings", json.dumps(settings))
    Image.fromarray(picture_HW3).save(path, pnginfo=note)


def _write_mp4(path: Path, video_FHW3: np.ndarray, *, fps: float) -> None:
    try:
        import av
    except ImportError as error:
        raise ValueError("writing MP4 needs the package av: install the extra `prep`") from error

    with av.open(str(path), "w") as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = video_FHW3.shape[1:3]
        # 4:2:0 needs even sides; 4:4:4 takes any and keeps the colours of small pictures.
        stream.pix_fmt = "yuv444p"
        for picture_HW3 in video_FHW3:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture_HW3, format="rgb24")))
        container.mux(stream.encode())


def draw_grid(pictures: Sequence[np.ndarray], prompts: Sequence[str], path: Path) -> None:
    """First frames of all pictures, a row for each prompt, which stands beside it."""
    from matplotlib.figure import Figure

    rows: dict[str, list[np.ndarray]] = {}
    for picture, prompt in zip(pictures, prompts, strict=True):
        rows.setdefault(prompt, []).append(picture[0])
    columns = min(max(map(len, rows.values())), 16)
    figure = Figure(figsize=(2.4 + 0.8 * columns, 0.8 * len(rows)), dpi=120)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (prompt, shown) in zip(axes, rows.items(), strict=True):
        for place in row:
            place.set_axis_off()
        for place, picture_HW3 in zip(row, shown, strict=False):
            place.imshow(picture_HW3)
        row[0].text(-0.15, 0.5, prompt, ha="right", va="center", transform=row[0].transAxes)
    figure.savefig(path, bbox_inches="tight")
