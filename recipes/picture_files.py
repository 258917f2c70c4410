"""Files of generated pictures: PNG or MP4 for each, a grid of all, samples.json."""

# C latent channels; F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

LISTING = "samples.json"
RATES = (0.01, 1000)
"""Least and most frames a second of a video file."""
_DPI = 120
_LABEL = 2.4  # width of the prompts, in inches
_CELL = (0.8, 2.4)
"""Least and greatest height of a picture in the grid, in inches."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture or video with all that made it."""

    frames_FHW3: np.ndarray  # uint8
    prompt: str
    seed: int
    settings: Mapping[str, Any]  # `fps` among them is that of a video
    latent_CFHW: Tensor | None = field(default=None, repr=False)  # written beside it, where given


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


def write(pictures: Sequence[Picture], folder: Path) -> Path:
    """Writes every picture (PNG) or video (MP4), grid.png and samples.json; returns the grid."""
    entries = [write_picture(picture, folder, i) for i, picture in enumerate(pictures)]
    return write_listing(entries, [picture.frames_FHW3[0] for picture in pictures], folder)


def write_picture(picture: Picture, folder: Path, number: int) -> dict[str, Any]:
    """Writes one, with its settings inside where the format has a place; its entry in the list."""
    frames, note = picture.frames_FHW3, {"seed": picture.seed, **picture.settings}
    name = f"{number:05d}.png" if len(frames) == 1 else f"{number:05d}.mp4"
    entry = {"file": name, "prompt": picture.prompt, **note}
    if len(frames) == 1:
        _write_png(folder / name, frames[0], picture.prompt, note)
    else:
        _write_mp4(folder / name, frames, fps=note["fps"])
    if picture.latent_CFHW is not None:
        entry["latent"] = f"{number:05d}.safetensors"
        _write_latent(folder / entry["latent"], picture.latent_CFHW)
    return entry


def write_listing(
    entries: Sequence[Mapping[str, Any]], firsts: Sequence[np.ndarray], folder: Path
) -> Path:
    """Writes the list of all files, and the grid of their first frames; returns the grid."""
    grid = folder / "grid.png"
    draw_grid(firsts, [entry["prompt"] for entry in entries], grid)
    (folder / LISTING).write_text(json.dumps(entries, indent=1) + "\n")
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
    import numpy as np

    try:
        import av
    except ImportError as error:
        raise ValueError("writing MP4 needs the package av: install the extra `prep`") from error

    # 4:2:0 is what every player shows. It needs even sides: the last row or column is repeated.
    _, height, width, _ = video_FHW3.shape
    even_FHW3 = np.pad(video_FHW3, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), "edge")
    with av.open(str(path), "w") as container:
        # A dataset's own rate may be one that no file can hold.
        rate = Fraction(min(max(fps, RATES[0]), RATES[1])).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = even_FHW3.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture_HW3 in even_FHW3:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture_HW3, format="rgb24")))
        container.mux(stream.encode())


def _write_latent(path: Path, latent_CFHW: Tensor) -> None:
    from safetensors.torch import save_file

    save_file({"latent": latent_CFHW.float().cpu().contiguous()}, path)


def false_colours(latent_CFHW: Tensor) -> np.ndarray:
    """Uint8 [F, H, W, 3]: the first three channels of a whitened latent as red, green and blue.

    The colours are the same at every step of a run: black is -2.5 deviations, white is 2.5.
    """
    import torch

    red_green_blue = [min(i, len(latent_CFHW) - 1) for i in range(3)]
    part_3FHW = latent_CFHW[red_green_blue].float().cpu() / 5 + 0.5
    levels = (part_3FHW.clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.permute(1, 2, 3, 0).contiguous().numpy()


def draw_grid(firsts: Sequence[np.ndarray], prompts: Sequence[str], path: Path) -> None:
    """Pictures [H, W, 3] in a row for each prompt, which stands beside it."""
    from matplotlib.figure import Figure

    rows: dict[str, list[np.ndarray]] = {}
    for picture_HW3, prompt in zip(firsts, prompts, strict=True):
        rows.setdefault(prompt, []).append(picture_HW3)
    columns = min(max(map(len, rows.values())), 16)
    cell = min(max(_CELL[0], *(len(picture) / _DPI for picture in firsts)), _CELL[1])
    aspect = max(1.0, *(picture.shape[1] / len(picture) for picture in firsts))
    size = _LABEL + cell * aspect * columns, cell * len(rows)
    figure = Figure(figsize=size, dpi=_DPI)
    close = {"left": _LABEL / size[0], "right": 1, "bottom": 0, "top": 1, "wspace": 0.05}
    axes = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw=close | {"hspace": 0.05})
    for row, (prompt, shown) in zip(axes, rows.items(), strict=True):
        for place in row:
            place.set_axis_off()
        for place, picture_HW3 in zip(row, shown, strict=False):
            place.imshow(picture_HW3)
        label = fill(shorten(prompt, width=120, placeholder="..."), width=40)
        row[0].text(-0.15, 0.5, label, ha="right", va="center", transform=row[0].transAxes)
    figure.savefig(path, bbox_inches="tight")
