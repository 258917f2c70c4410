"""HTML pages that need no server or network, with search and filters over many samples.

Pictures and clips are scaled down so that a browser can open the page.
"""

# F frames, H rows, W columns; 3 colours

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from PIL import Image

from data_prep.refusals import printable
from dit.codecs.sound.files import page_sound, waveform_picture
from dit.safe_writing import write_atomically

MOST_ROWS = 100_000
"""Most samples that a page lists; a browser needs about a second for so many."""
Row = dict[str, Any]
"""Facts about a listed sample, by name. All rows have name and caption. They may also have bucket
(the size), facts, refused (the reason), detail, group (the number of its group of near duplicates),
repeats (how many samples have its caption), picture, clip, waveform and sound (data URIs), and file
(a path relative to the page)."""
PAGE_BYTES = 36_000_000
"""Most bytes of all pictures of a page; all clips may have as many bytes again, and so may all
sounds. Base64 makes them a third longer."""
# Longer side in pixels -> bytes of a thumbnail of foliage; drawings take a third of these bytes.
_SIDES = {128: 3_400, 96: 2_100, 64: 1_200, 48: 750, 32: 480, 24: 340}
_LOOKS = ("picture", "clip", "waveform")
_LOSSLESS = 64 * 64  # most pixels of a picture that is stored without loss
_LONGEST = 2**24 - 1  # milliseconds that a frame of WebP is shown
_FRAMES, _FPS = 16, 16.0  # most frames of a shown clip; frame rate of a clip that names none


def write_html(path: Path, title: str, parts: Iterable[str], rows: Sequence[Row]) -> None:
    """Writes a page to `path`, with `title`, the HTML `parts`, and the list of samples `rows`."""
    shown, cut = listed(rows), ""
    if len(shown) < len(rows):
        cut = f"<p>{len(shown):,} of {len(rows):,} samples are listed; refused samples and near"
        cut += " duplicates were chosen first.</p>"
    # Without a "<", no value can end the script element.
    values = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    page = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title), parts="\n".join([*parts, cut]), rows=values
    )
    write_atomically(path, printable(page).encode())


def listed(rows: Sequence[Row]) -> Sequence[Row]:
    """The part of `rows` that a page lists: at most MOST_ROWS, in their order.

    If there are more, refused samples and near duplicates are chosen first.
    """
    if len(rows) <= MOST_ROWS:
        return rows
    wanted = sorted(range(len(rows)), key=lambda n: not (rows[n].get("refused") or
                                                         rows[n].get("group")))  # fmt: skip
    return [rows[number] for number in sorted(wanted[:MOST_ROWS])]


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        number = " class=n" if isinstance(value, int | float) else ""
        return f"<td{number}>{escape(f'{value:,}' if number else str(value))}</td>"

    lines = ("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return (
        "<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
        + "".join(lines) + "</table>"
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Thumbnail:
    """The picture of a sample on a page; for a video also a clip, and its sound."""

    picture: bytes
    clip: bytes = b""
    """Clip of some frames, as animated WebP; empty for a picture."""
    waveform: bytes = b""
    """Picture of the sound's waveform, as WebP; empty without sound."""
    sound: bytes = b""
    """Sound as MP4; empty without sound."""

    @property
    def row(self) -> Row:
        """Picture, clip, waveform and sound as `data:` URIs by name, for the sample's `Row`."""
        found = {name: ("image/webp", getattr(self, name)) for name in _LOOKS}
        found["sound"] = "audio/mp4", self.sound
        return {
            name: f"data:{kind};base64,{base64.b64encode(content).decode()}"
            for name, (kind, content) in found.items()
            if content
        }

    def with_sound(self, samples_CS: np.ndarray | None, rate: int) -> Thumbnail:
        """A copy with the sound and its waveform; the thumbnail itself if `samples_CS` is None.

        `rate` is the sampling rate in Hz.
        """
        if samples_CS is None:
            return self
        sound = page_sound(samples_CS, rate)
        return replace(self, waveform=waveform_picture(samples_CS), sound=sound)


def side_for(samples: int) -> int:
    """The longest side, in pixels, of the thumbnails on a page of `samples` samples.

    It is the largest in `_SIDES` for which the page has room, or the smallest if none fits.
    """
    samples = min(samples, MOST_ROWS)
    return next((s for s, size in _SIDES.items() if samples * size <= PAGE_BYTES), min(_SIDES))


def frames_shown(count: int) -> np.ndarray:
    """Indices of the frames, out of `count`, that a thumbnail shows, evenly spread."""
    return np.linspace(0, count - 1, min(count, _FRAMES)).round().astype(int)


def with_controls(shown_FHW3: np.ndarray, controls: Iterable[np.ndarray]) -> np.ndarray:
    """Puts control pictures and videos to the left of the frames of a sample.

    Controls of another height, or with another number of frames (except pictures), are left out.
    """
    frames, height = shown_FHW3.shape[:2]
    of_same = (one[frames_shown(len(one))] for one in controls if one.shape[1] == height)
    parts = [np.broadcast_to(x, (frames, *x.shape[1:])) for x in of_same if len(x) in (1, frames)]
    return np.concatenate([*parts, shown_FHW3], axis=2)


def beside_rejected(shown_FHW3: np.ndarray, rejected_FHW3: np.ndarray) -> np.ndarray:
    """Puts the frames of the rejected sample to the right of the frames of the preferred one.

    A rejected sample of another size is left out.
    """
    other_FHW3 = rejected_FHW3[frames_shown(len(rejected_FHW3))][: len(shown_FHW3)]
    if other_FHW3.shape[:2] != shown_FHW3.shape[:2]:
        return shown_FHW3
    return np.concatenate([shown_FHW3, other_FHW3], axis=2)


def thumbnail(frames_FHW3: np.ndarray, *, side: int, seconds: float) -> Thumbnail:
    """Thumbnail of uint8 frames: the first as a picture, several also as a clip of `seconds`.

    The clip is shorter if its frames would be shown for more than `_LONGEST` ms each. Frames are
    scaled down to at most `side` pixels a side; the picture keeps every pixel value if it is small.
    """
    frames, height, width, _ = frames_FHW3.shape
    small = max(height, width) <= side and height * width <= _LOSSLESS
    picture = _webp(frames_FHW3[:1], side, lossless=small)
    if frames == 1:
        return Thumbnail(picture=picture)
    each = min(round(1000 * seconds / frames), _LONGEST)
    return Thumbnail(picture=picture, clip=_webp(frames_FHW3, side, duration=each))


def seconds_of(frames: int, fps: float | None) -> float:
    """Duration in seconds of `frames` frames at the rate `fps`, or at `_FPS` if `fps` is None."""
    return frames / (fps or _FPS)


def _webp(frames_FHW3: np.ndarray, side: int, **options: Any) -> bytes:
    """WebP file of frames, scaled down to at most `side` pixels a side.

    Several frames become an animation.
    """
    images = [Image.fromarray(frame_HW3) for frame_HW3 in frames_FHW3]
    for image in images:
        image.thumbnail((side, side))
    content = io.BytesIO()
    images[0].save(
        content, "webp", quality=80, loop=0, save_all=True, append_images=images[1:], **options
    )
    return content.getvalue()


@dataclass
class PageRoom:
    """The bytes for which a page still has room, counted for pictures, clips and sounds."""

    pictures: int = PAGE_BYTES
    clips: int = PAGE_BYTES
    sounds: int = PAGE_BYTES
    shown: int = 0  # samples with a picture

    def take(self, one: Thumbnail | None) -> Thumbnail | None:
        """Subtracts the bytes of the thumbnail `one` from the room, and returns the thumbnail.

        A clip or a sound that does not fit is removed from the thumbnail. The result is None if the
        picture does not fit, or if `one` is None.
        """
        if one is None or len(one.picture) > self.pictures:
            return None
        if len(one.clip) > self.clips:
            one = replace(one, clip=b"")
        if len(one.sound) > self.sounds:
            one = replace(one, sound=b"", waveform=b"")
        self.pictures -= len(one.picture)
        self.sounds -= len(one.sound)
        self.clips -= len(one.clip)
        self.shown += 1
        return one
