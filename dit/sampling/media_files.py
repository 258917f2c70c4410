"""Writes generated pictures: a PNG or MP4 with sound for each, samples.json, a grid of all."""

# C latent channels; F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from dit.console import Console
from dit.parsing import parse_json
from dit.progress import counted, first_of
from dit.sampling.grid import beside, draw_grid
from dit.system_errors import reason
from dit.watching import NotShown, watching

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dit.codecs.sound.codec import SoundCodec
    from dit.codecs.sound.files import Waveform

LISTING, GRID = "samples.json", "grid.png"
RATES = (0.01, 1000)
"""Smallest and largest frame rate of a video file, in frames per second."""
_OURS = re.compile(r"\d{5,}\.(png|mp4|safetensors|wav|webp)")
_WRITTEN = ("file", "latent", "waveform", "wav")  # keys of samples.json that name files
_SHOWN = 3
_BT709, _LIMITED = 1, 1  # ITU-T H.273, tables 2 to 4; FFmpeg's number of levels from 16 to 235


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A generated picture or video, with the prompt, seed and settings that produced it."""

    frames_FHW3: np.ndarray  # uint8
    prompt: str
    seed: int
    settings: Mapping[str, Any]  # with `fps`, the frame rate of a video
    latent_CFHW: Tensor | None = field(
        default=None, repr=False
    )  # if given, it is written beside the picture
    clear_FHW4: np.ndarray | None = None  # uint8, with transparency, of codecs that have it
    given_HW3: np.ndarray | None = None  # uint8, the given picture beside it in the grid
    sound: Waveform | None = None  # of a video, and of the same length
    sound_latent_KA: Tensor | None = field(default=None, repr=False)  # beside `latent_CFHW`
    keeps_wav: bool = False  # whether its sound is also written as WAV, which is lossless


def make_folder(folder: Path, *, count: int) -> None:
    """Creates `folder` for `count` pictures, so that problems are found before sampling.

    Raises:
        ValueError: the folder cannot be written, or it has a file with the name of a picture, of
            the list or of the grid that no earlier generation wrote.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder} cannot be written ({reason(error)}); choose another folder"
        ) from error
    numbered = {file.name for file in folder.iterdir() if _OURS.fullmatch(file.name)}
    unlisted = numbered - _names(folder / LISTING)
    others = sorted(name for name in unlisted if int(Path(name).stem) < count)
    if not _lists_samples(folder / LISTING):  # then both files are of another program
        others += [name for name in (LISTING, GRID) if (folder / name).exists()]
    if others:
        raise ValueError(
            f"--output_dir {folder} has files that no {LISTING} of samples names, and that"
            f" samples would replace: {first_of(others, _SHOWN)}; choose another folder, or move"
            " them away"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The files that were written for pictures, and notices of failures."""

    grid: Path | None  # None where it could not be drawn
    lost: tuple[NotShown, ...]  # pictures that could not be written
    notes: tuple[NotShown, ...]  # further notices for the user


def write_media(pictures: Sequence[Picture], folder: Path) -> Written:
    """Writes every picture (PNG) or video (MP4), samples.json and the grid to `folder`.

    A picture that cannot be written is not listed; the others are written.

    Raises:
        OSError: samples.json cannot be written.
    """
    lost: list[NotShown] = []
    entries, firsts = [], []
    for number, picture in enumerate(pictures):
        with watching(f"sample {number}", lost):
            entries.append(write_picture(picture, folder, number))
            firsts.append(beside(picture.given_HW3, picture.frames_FHW3[0]))
    grid, notes = write_listing(entries, firsts, folder)
    return Written(grid=grid, lost=tuple(lost), notes=tuple(notes))


def report_written(written: Written, folder: Path, *, count: int) -> None:
    """Prints how many of `count` samples were written to `folder`, and all notices.

    Raises:
        ValueError: some samples could not be written.
    """
    console = Console()
    for note in written.notes:
        console.print(str(note))
    listed = f"{LISTING} and {GRID}" if written.grid else LISTING
    left = count - len(written.lost)
    console.print(f"{counted(left, 'sample')}, {listed} in {folder}")
    if written.lost:
        raise ValueError(
            f"{len(written.lost)} of {count} samples could not be written into {folder}:"
            f" {'; '.join(map(str, written.lost[:_SHOWN]))}. Remove the cause, and run the command"
            " again"
        )


def write_picture(picture: Picture, folder: Path, number: int) -> dict[str, Any]:
    """Writes the picture or video number `number`, and returns its entry for samples.json.

    Its latents and sound are files of their own. A PNG has prompt and settings in its metadata.
    """
    frames, note = picture.frames_FHW3, {"seed": picture.seed, **picture.settings}
    name = f"{number:05d}.png" if len(frames) == 1 else f"{number:05d}.mp4"
    entry = {"file": name, "prompt": picture.prompt, **note}
    try:
        if len(frames) == 1:
            pixels = frames if picture.clear_FHW4 is None else picture.clear_FHW4
            _write_png(folder / name, pixels[0], picture.prompt, note)
        else:
            _write_mp4(folder / name, frames, fps=note["fps"], sound=picture.sound)
            entry |= _write_sound(picture, folder, number)
        if picture.latent_CFHW is not None:
            entry["latent"] = f"{number:05d}.safetensors"
            latents = {"latent": picture.latent_CFHW, "sound_latent": picture.sound_latent_KA}
            _write_latents(folder / entry["latent"], latents)
    except BaseException:
        (folder / name).unlink(missing_ok=True)  # a half-written file would look like a picture
        raise
    return entry


def write_listing(
    entries: Sequence[Mapping[str, Any]],
    firsts: Sequence[np.ndarray | None],
    folder: Path,
    *,
    title: str = "",
) -> tuple[Path | None, list[NotShown]]:
    """Writes samples.json, then the grid of the first frames; returns the grid's path and notices.

    `entries` are those of `write_picture`, and `firsts` has a first frame [H, W, 3] for each of
    them; None is left out of the grid. `title` is the grid's top line. The path is None if the
    folder then has no grid. Files that only the previous samples.json lists are removed.

    Raises:
        OSError: the list cannot be written.
    """
    before = _names(folder / LISTING)
    replace_file(folder / LISTING, json.dumps(entries, indent=1).encode() + b"\n")
    notes: list[NotShown] = []
    with watching("files of an earlier generation", notes):
        notes += _remove_stale(folder, before=before, now=_names(folder / LISTING))
    grid = folder / GRID
    with watching(GRID, notes):
        there = [i for i, first in enumerate(firsts) if first is not None]
        if there:
            prompts = [entries[i]["prompt"] for i in there]
            grid.unlink(missing_ok=True)  # otherwise an old grid would stay if drawing fails
            shown = [first for first in firsts if first is not None]
            notes += draw_grid(shown, prompts, grid, title=title)
    return (grid if grid.is_file() else None), notes


def replace_file(file: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader gets either the old content or the new one."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _names(listing: Path) -> set[str]:
    each = _entries(listing) or []
    said = [one.get(key) for one in each if isinstance(one, dict) for key in _WRITTEN]
    return {name for name in said if isinstance(name, str) and _OURS.fullmatch(name)}


def _lists_samples(listing: Path) -> bool:
    entries = _entries(listing)
    return entries is not None and all(
        isinstance(one, dict) and one.keys() >= {"prompt", "seed"} for one in entries
    )


def _entries(listing: Path) -> list[Any] | None:
    try:
        entries = parse_json(listing.read_bytes())
    except (OSError, ValueError):
        return None
    return entries if isinstance(entries, list) else None


def _remove_stale(folder: Path, *, before: set[str], now: set[str]) -> list[NotShown]:
    """Removes the files that only the previous list has; returns notices.

    `before` and `now` are the names in both lists. Files that neither list has are reported.
    """
    stale = sorted(name for name in before - now if (folder / name).is_file())
    for name in stale:
        (folder / name).unlink()
    there = {file.name for file in folder.iterdir() if _OURS.fullmatch(file.name)}
    found = []
    if stale:
        found.append(_files(stale, "removed, which only the samples.json before this one names"))
    if strange := sorted(there - now):
        found.append(_files(strange, "left as they are, though samples.json does not name them"))
    return found


def _files(names: Sequence[str], what: str) -> NotShown:
    return NotShown(
        what="files of an earlier generation", because=f"{first_of(names, _SHOWN)} {what}"
    )


def _write_png(
    path: Path, picture_HW3: np.ndarray, prompt: str, settings: Mapping[str, Any]
) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("prompt", prompt)
    note.add_text("settings", json.dumps(settings))
    Image.fromarray(picture_HW3).save(path, pnginfo=note)


def waveform_of(latent_KA: Tensor, codec: SoundCodec, seconds: float) -> Waveform:
    """The waveform of a sound's latent [K, A], decoded by `codec` and cut to `seconds`."""
    from dit.codecs.sound.files import Waveform

    samples = round(seconds * codec.rate)
    samples_CS = codec.decode(latent_KA, samples).numpy()
    return Waveform(samples_CS=samples_CS, rate=codec.decoded_rate)


def _write_sound(picture: Picture, folder: Path, number: int) -> dict[str, Any]:
    """Writes the waveform's picture, and a WAV file if requested, for sample `number`.

    Returns their entries in samples.json; empty for a picture without sound.
    """
    from dit.codecs.sound.files import wav_file, waveform_picture

    if picture.sound is None:
        return {}
    samples_CS, rate = picture.sound.samples_CS, picture.sound.rate
    said = {"sound_rate": rate, "waveform": f"{number:05d}.webp"}
    (folder / said["waveform"]).write_bytes(waveform_picture(samples_CS))
    if picture.keeps_wav:
        said["wav"] = f"{number:05d}.wav"
        (folder / said["wav"]).write_bytes(wav_file(samples_CS, rate))
    return said


def _write_mp4(
    path: Path, video_FHW3: np.ndarray, *, fps: float, sound: Waveform | None = None
) -> None:
    """Writes a video as H.264, and its sound as AAC, which begins with the first frame.

    Raises:
        ValueError: PyAV is not installed.
    """
    import numpy as np

    from dit.codecs.sound.files import AacTrack

    try:
        import av
    except ImportError as error:
        raise ValueError(
            "writing MP4 needs the package av; install it with pip install 'megatron-dit[prep]'"
        ) from error

    # Every player shows 4:2:0. It needs even sides, so the last row or column is repeated.
    _, height, width, _ = video_FHW3.shape
    even_FHW3 = np.pad(video_FHW3, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), "edge")
    # An absolute path, because FFmpeg takes `wan` in `wan:lora` for a protocol.
    with av.open(str(path.absolute()), "w") as container:
        # The frame rate of a dataset may lie outside what the container can store.
        rate = Fraction(min(max(fps, RATES[0]), RATES[1])).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = even_FHW3.shape[1:3]
        stream.pix_fmt = "yuv420p"
        # If a file does not state it, players guess the colour space by size: BT.601 or BT.709.
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
        codec.color_range = _LIMITED
        track = None if sound is None else AacTrack(container, sound)
        yuv = {"format": "yuv420p", "dst_colorspace": _BT709, "dst_color_range": _LIMITED}
        for picture_HW3 in even_FHW3:
            frame = av.VideoFrame.from_ndarray(picture_HW3, format="rgb24")
            container.mux(stream.encode(frame.reformat(**yuv)))
        container.mux(stream.encode())
        if track is not None:
            track.write()


def _write_latents(path: Path, latents: Mapping[str, Tensor | None]) -> None:
    from safetensors.torch import save_file

    found = {name: x.float().cpu().contiguous() for name, x in latents.items() if x is not None}
    save_file(found, path)


def false_colours(latent_CFHW: Tensor) -> np.ndarray:
    """The first three channels of a whitened latent as red, green and blue, uint8 [F, H, W, 3].

    With fewer channels the last one is repeated. The scale is fixed, so that pictures at different
    steps of a run are comparable: black is -2.5 standard deviations, white is 2.5.
    """
    import torch

    red_green_blue = [min(i, len(latent_CFHW) - 1) for i in range(3)]
    part_3FHW = latent_CFHW[red_green_blue].float().cpu() / 5 + 0.5
    levels = (part_3FHW.clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.permute(1, 2, 3, 0).contiguous().numpy()
