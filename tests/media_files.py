"""Real media files, made on the spot."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

CODECS = {".mp4": "libx264", ".mov": "libx264", ".mkv": "libx264", ".avi": "mpeg4"}
CODECS |= {".webm": "libvpx-vp9"}
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
