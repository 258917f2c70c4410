"""Writes waveforms as lossless WAV, as AAC in MP4 with or without video, and as pictures."""

# C channels, S samples; H W rows and columns of a picture

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from dit.codecs.sound.tracks import resampled

AAC_RATES = (
    7350,
    8000,
    11025,
    12000,
    16000,
    22050,
    24000,
    32000,
    44100,
    48000,
    64000,
    88200,
    96000,
)
"""Sampling rates of AAC in Hz (ISO/IEC 14496-3, table 1.18)."""
AAC_FRAME = 1024
"""Samples in an AAC frame; a track in a file may be longer than its waveform by up to one frame."""
_FLOAT = 3  # WAVE_FORMAT_IEEE_FLOAT
_SHOWN_RATE = 24_000  # of sound on pages
_SHOWN_BITS = 40_000  # a second and channel


def wav_file(samples_CS: np.ndarray, rate: int) -> bytes:
    """The bytes of a WAV file with a waveform [C, S] in 32-bit floats, which is lossless.

    Full scale is 1; `rate` is in Hz.
    """
    channels, count = samples_CS.shape
    content = np.ascontiguousarray(samples_CS.T, "<f4").tobytes()
    head = struct.pack("<HHIIHHH", _FLOAT, channels, rate, 4 * channels * rate, 4 * channels, 32, 0)
    chunks = _chunk(b"fmt ", head) + _chunk(b"fact", struct.pack("<I", count))
    return _chunk(b"RIFF", b"WAVE" + chunks + _chunk(b"data", content))


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content


def aac_rate(rate: int) -> int:
    """The AAC sampling rate for a waveform of `rate` Hz: the same, or the next higher one.

    For waveforms above 96,000 Hz, the highest rate of AAC, it is 96,000 Hz.
    """
    return next((one for one in AAC_RATES if one >= rate), AAC_RATES[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Waveform:
    """Sound of a video: its waveform and sampling rate."""

    samples_CS: np.ndarray  # float32, full scale is 1; one or two channels
    rate: int  # samples a second


class AacTrack:
    """The sound track of an MP4 file that is being written."""

    def __init__(self, container: Any, sound: Waveform, bits: int | None = None):
        """Adds a track for `sound` to `container`, an MP4 file that PyAV has opened for writing.

        `bits` is the bit rate of each channel in bit/s; None uses FFmpeg's default.
        """
        self._container, self._rate = container, aac_rate(sound.rate)
        self._samples_CS = resampled(sound.samples_CS, sound.rate, self._rate)
        self._layout = "mono" if len(self._samples_CS) == 1 else "stereo"
        self._stream = container.add_stream("aac", rate=self._rate, layout=self._layout)
        if bits is not None:
            self._stream.bit_rate = bits * len(self._samples_CS)

    def write(self) -> None:
        """Encodes and writes the whole track; call it after all tracks have been added."""
        import av

        stream, clipped_CS = self._stream, self._samples_CS.clip(-1, 1)
        for at in range(0, clipped_CS.shape[1], AAC_FRAME):
            packed = np.ascontiguousarray(clipped_CS[:, at : at + AAC_FRAME].T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=self._layout)
            frame.sample_rate, frame.pts = self._rate, at
            frame.time_base = Fraction(1, self._rate)
            self._container.mux(stream.encode(frame))
        self._container.mux(stream.encode(None))


def page_sound(samples_CS: np.ndarray, rate: int) -> bytes:
    """The bytes of an MP4 file with a waveform [C, S], small enough for a page with many of them.

    `rate` is that of the waveform, in Hz. The file has at most 24 kHz and 40 kbit/s per channel.
    """
    import av

    content, shown_CS = io.BytesIO(), samples_CS
    if rate > _SHOWN_RATE:
        shown_CS, rate = resampled(samples_CS, rate, _SHOWN_RATE), _SHOWN_RATE
    with av.open(content, "w", format="mp4") as container:
        AacTrack(container, Waveform(samples_CS=shown_CS, rate=rate), _SHOWN_BITS).write()
    return content.getvalue()


def waveform_picture(samples_CS: np.ndarray, *, width: int = 256, height: int = 32) -> bytes:
    """The bytes of a WebP picture of a waveform [C, S]; each column shows the range of its samples.

    The channels stand below one another, each `height` pixels high for the range -1 to 1. `width`
    is in pixels.
    """
    from PIL import Image

    lanes = [_lane(samples_S, width, height) for samples_S in samples_CS]
    content = io.BytesIO()
    Image.fromarray(np.concatenate(lanes)).save(content, "webp", lossless=True)
    return content.getvalue()


def _lane(samples_S: np.ndarray, width: int, height: int) -> np.ndarray:
    """The picture of one channel: a waveform, blue on white, uint8 [H, W, 3]."""
    edges = np.linspace(0, len(samples_S), width + 1).astype(int)
    edges[1:] = np.maximum(edges[1:], edges[:-1] + 1)
    pieces = [samples_S[low:high] for low, high in pairwise(edges)]
    bounds = [(piece.min(), piece.max()) if len(piece) else (0.0, 0.0) for piece in pieces]
    rows_W2 = (height - 1) * (1 - np.clip(bounds, -1, 1)[:, ::-1]) / 2  # upper row, lower row
    row_H1 = np.arange(height)[:, None]
    is_inside_HW = (row_H1 >= np.floor(rows_W2[:, 0])) & (row_H1 <= np.ceil(rows_W2[:, 1]))
    lane = np.full((height, width, 3), 255, np.uint8)
    lane[is_inside_HW] = (74, 126, 187)
    return lane
