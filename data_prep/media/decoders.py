"""The library that decodes kept frames: PyAV or torchcodec. Planning always uses PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from data_prep.media.clips import Entry
from data_prep.media.images import open_media
from data_prep.media.videos import frames, is_plain, packet_times
from data_prep.refusals import PrepError


class VideoDecoder(StrEnum):
    """Values of `--video_loader_type` that can decode."""

    PYAV = "pyav"
    TORCHCODEC = "torchcodec"

    def check(self) -> None:
        """Raises PrepError where the library is not installed, or finds no FFmpeg."""
        if self is VideoDecoder.TORCHCODEC:
            try:
                _torchcodec()
            except (ImportError, OSError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                raise PrepError(
                    f"--video_loader_type torchcodec cannot be used here ({reason}). Install"
                    " torchcodec and the FFmpeg libraries that it calls, or leave the option out:"
                    " PyAV brings its own"
                ) from error

    def frames(self, file: Path | BinaryIO, entry: Entry) -> Iterator[Image.Image]:
        """The frames that `entry` keeps, in its order, as upright pictures.

        They are RGB, and RGBA where they have transparency.

        Raises:
            RefusedError: one of them cannot be decoded.
        """
        # torchcodec finds frames by their times only.
        if self is VideoDecoder.PYAV or entry.numbers:
            return frames(file, entry.keep, entry.numbers, background=None)
        return _frames_of_torchcodec(file, entry)


def _torchcodec() -> Any:
    from torchcodec.decoders import VideoDecoder as Decoder  # type: ignore[import-not-found]

    return Decoder


def _frames_of_torchcodec(file: Path | BinaryIO, entry: Entry) -> Iterator[Image.Image]:
    """Frames by torchcodec; from the first one that it does not find, by PyAV."""
    given = 0
    with open_media(file) as stream:
        try:
            for picture in _found_by_torchcodec(stream, entry):
                yield picture
                given += 1
        except (RuntimeError, ValueError, LookupError):
            yield from frames(stream, entry.keep[given:], background=None)


def _found_by_torchcodec(stream: BinaryIO, entry: Entry) -> Iterator[Image.Image]:
    """Frames by torchcodec; raises LookupError at the first one that it does not find.

    torchcodec seeks by tables, which MPEG transport and program streams do not have. It leaves out
    transparency and mirrors, and turns frames only as their container says.
    """
    if not is_plain(stream):
        raise LookupError(entry.source)
    tick, size = Fraction(entry.tick), (entry.width, entry.height)
    # By number, because a search by time needs durations, which some files lack.
    numbers = {at: number for number, at in enumerate(packet_times(stream))}
    stream.seek(0)
    decoder = _torchcodec()(stream, dimension_order="NHWC", seek_mode="exact")
    for at in entry.keep:
        frame = decoder.get_frame_at(numbers[at])
        if abs(frame.pts_seconds - float(at * tick)) > tick:
            raise LookupError(at)
        picture = Image.fromarray(frame.data.numpy())
        # torchcodec does not make pixels square.
        is_square = picture.size == size
        yield picture if is_square else picture.resize(size, Image.Resampling.LANCZOS)
