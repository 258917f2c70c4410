"""Reads the pictures of video files, turned upright as in data_prep."""

# F 3 H W pictures of a clip, colours, rows and columns

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dit.codecs.frame_pictures import ENDINGS, first_film, upright_pictures
from dit.codecs.rgb import Placement
from dit.sampling.latent_sizes import Size
from dit.system_errors import explained


def is_video(file: str) -> bool:
    """Whether `file` has the suffix of a video file."""
    return Path(file).suffix.lower() in ENDINGS


def check_video(file: str, *, option: str) -> None:
    """Checks that `file` has the suffix of a video file; `option` is its option, for the message.

    Raises:
        ValueError: the file has another suffix.
    """
    if not is_video(file):
        raise ValueError(
            f"{option} {file} is not named like a video; give a file that ends in one of"
            f" {', '.join(sorted(ENDINGS))}"
        )


def read_clip(file: str, size: Size, *, option: str, place: Placement | None = None) -> Tensor:
    """The first F pictures of a video, or all if it has fewer, [F, 3, H, W] in [-1, 1].

    `size` is (F, H, W). Pictures are resized as by `read_picture`, or by `place`, which must result
    in this size.

    Raises:
        ValueError: the file is missing, or is no video.
    """
    most, height, width = size
    place = place or Placement((width, height), (width, height))
    with _pictures(file, option) as pictures:
        resized = [np.asarray(place.apply(one), np.float32) for one in islice(pictures, most)]
    if not resized:
        raise ValueError(f"{option} {file} has no pictures; give another video")
    numbers_FHW3 = torch.from_numpy(np.stack(resized))
    return (2 * (numbers_FHW3 / 255) - 1).permute(0, 3, 1, 2)


def first_of_clip(file: str, *, option: str) -> Image.Image:
    """The first picture of the video `file`, at its own size.

    Raises:
        ValueError: the file is missing, or is no video.
    """
    with _pictures(file, option) as pictures:
        found = next(pictures, None)
    if found is None:
        raise ValueError(f"{option} {file} has no pictures; give another video")
    return found


def shorter(file: str, frames: int, *, stride: int, option: str) -> str:
    """A notice if a video has fewer frames than the sample (`frames`); empty if it has enough.

    The frames that are used are cut to `stride` * n + 1, as the VAE encodes.

    Raises:
        ValueError: the file is missing, or is no video.
    """
    with _pictures(file, option) as pictures:
        found = sum(1 for _ in islice(pictures, frames))
    whole = (found - 1) // stride * stride + 1
    few = f"{option} {file} has fewer frames than the sample ({found} of {frames})"
    return "" if found == frames else f"{few}: the first {whole} of them are used"


@contextmanager
def _pictures(file: str, option: str) -> Iterator[Iterator[Image.Image]]:
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"{option} {file}: reading a video needs the package av; install it with pip install"
            " 'megatron-dit[prep]'"
        ) from error
    try:
        # Without `file:`, FFmpeg takes `wan` in a relative path such as `wan:lora` for a protocol.
        with av.open(f"file:{file}") as container:
            film = first_film(container)
            if film is None or film.codec_context is None:
                raise ValueError("it holds no video of a known codec")
            yield upright_pictures(container, film)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option} {file} cannot be read as a video ({explained(error)}); give a video file"
        ) from error
