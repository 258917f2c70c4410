"""Real media files, made on the spot."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition
from PIL import Image

CODECS = {".mp4": "libx264", ".mov": "libx264", ".mkv": "libx264", ".avi": "mpeg4"}
CODECS |= {".webm": "libvpx-vp9"}
TITLE = "XXXX"  # of numbered videos
STEP = 8  # grey levels between frames, far above what a codec moves


def level(index: int) -> int:
    return 16 + STEP * (index % 28)


def image(path: Path, width: int = 32, height: int = 24, mode: str = "RGB", seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def video(
    path: Path,
    count: int = 12,
    *,
    size: tuple[int, int] = (64, 48),
    times: list[float] | None = None,
    rotation: int = 0,
    aspect: Fraction | None = None,
    faststart: bool = False,
) -> Path:
    """A clip whose frame number n has grey `level(n)`, brighter by 12 in its upper left corner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"movflags": "faststart"} if faststart else {}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(CODECS[path.suffix.lower()], rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 5
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(count):
            grey = np.full((size[1], size[0], 3), level(index), np.uint8)
            grey[: size[1] // 2, : size[0] // 2] += 12
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[index] * 1000), Fraction(1, 1000)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def numbered_frame(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray:
    """Grey levels [H, W] with `number` as eight black or white fields in the upper half.

    The lower half is noise, so that no frame is small.
    """
    width, height = size
    picture = np.random.default_rng(number).integers(40, 210, (height, width)).astype(np.uint8)
    for bit in range(8):
        row, column = divmod(bit, 4)
        field = slice(row * 16, row * 16 + 16), slice(column * 16, column * 16 + 16)
        picture[field] = 210 if number >> bit & 1 else 40
    return picture


def number_of(picture: Image.Image) -> int:
    """What `numbered_frame` wrote into a picture that a codec has changed a little."""
    grey = np.asarray(picture.convert("L"), int)
    fields = [divmod(bit, 4) for bit in range(8)]
    levels = [grey[r * 16 + 6 : r * 16 + 10, c * 16 + 6 : c * 16 + 10].mean() for r, c in fields]
    return sum((level > 125) << bit for bit, level in enumerate(levels))


def numbered_video(
    path: Path,
    codec: str,
    options: dict[str, str] | None = None,
    *,
    count: int = 40,
    first: int = 0,
    muxer: dict[str, str] | None = None,
    cover: bool = False,
) -> Path:
    """A clip at 25 frames a second whose frame number n shows n, the first one after `first`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=muxer or {}) as container:
        container.metadata["title"] = TITLE
        if cover:
            picture = container.add_stream("mjpeg", rate=25, width=64, height=48)
            picture.pix_fmt = "yuvj420p"
            picture.disposition = Disposition.attached_pic
        stream = container.add_stream(codec, rate=25, options=options or {})
        stream.width, stream.height = 64, 48
        stream.pix_fmt = {"mjpeg": "yuvj420p", "prores_ks": "yuv422p10le"}.get(codec, "yuv420p")
        if cover:
            black = av.VideoFrame.from_ndarray(np.zeros((48, 64), np.uint8), format="gray")
            container.mux(picture.encode(black.reformat(format="yuvj420p")))
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number), format="gray")
            frame = frame.reformat(format=stream.pix_fmt)
            frame.pts, frame.time_base = first + number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def video_of(
    path: Path,
    pictures: Iterable[np.ndarray],
    *,
    codec: str = "png",
    pix_fmt: str = "rgb24",
    options: dict[str, str] | None = None,
) -> Path:
    """A clip of uint8 pictures [H, W, 3] or [H, W, 4] at 8 frames a second; png loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = None
    with av.open(str(path), "w") as container:
        for number, picture in enumerate(pictures):
            if stream is None:
                stream = container.add_stream(codec, rate=8, options=options or {})
                stream.height, stream.width, _ = picture.shape
                stream.pix_fmt = pix_fmt
            stored = "rgb24" if picture.shape[2] == 3 else "rgba"
            frame = av.VideoFrame.from_ndarray(picture, format=stored).reformat(format=pix_fmt)
            frame.pts, frame.time_base = number, Fraction(1, 8)
            container.mux(stream.encode(frame))
        assert stream is not None
        container.mux(stream.encode())
    return path


def turned_by(path: Path, copy: Path, matrix: tuple[float, float, float, float]) -> Path:
    """A copy of an MP4 or QuickTime file with a, b, c and d in its display matrix.

    ISO/IEC 14496-12, 8.3.2: `tkhd`, version 0. They are 16.16 numbers; the last of nine is 2.30.
    """
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 4
    assert content[place] == 0
    a, b, c, d = (round(value * 65536) for value in matrix)
    struct.pack_into(">9i", content, place + 40, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    copy.write_bytes(content)
    return copy
