"""Draws the media that `parity.py` packs, and damages some samples of the shards."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path


def draw_media(folder: Path) -> None:
    """Writes pictures of several sizes, one of them too large for a pack, and short videos."""
    import av
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    sizes = [(16, 24), (32, 16), (20, 28), (12, 12), (24, 16)]
    folder.mkdir()
    for i in range(64):
        height, width = (96, 96) if i == 40 else sizes[i % len(sizes)]
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / f"picture_{i:02d}.png")
        (folder / f"picture_{i:02d}.txt").write_text("a red cat " * (i % 4) + f"number {i}")
    for i in range(16):
        with av.open(str(folder / f"video_{i:02d}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=12)
            stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
            for _ in range(3 + 2 * (i % 2)):
                frame = rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        (folder / f"video_{i:02d}.txt").write_text(f"a blue dog runs {i}")


def damage(shard: Path) -> None:
    """Damages a shard in place: flips bits of every ninth sample, so that its checksum is wrong."""
    with tarfile.open(shard) as tar:
        payloads = [member for member in tar if member.name.endswith(".safetensors")]
    with shard.open("r+b") as file:
        for member in payloads[::9]:
            file.seek(member.offset_data + member.size - 2)
            byte = file.read(1)[0]
            file.seek(-1, io.SEEK_CUR)
            file.write(bytes([byte ^ 0xFF]))
