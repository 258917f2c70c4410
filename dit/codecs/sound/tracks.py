"""Reads the samples of a time span of a file's sound track, at the rate of a codec.

1. `SoundTrack.of`         file -> the track that is taken, by its header
2. `SoundTrack.read_span`  start and seconds -> samples; what the track lacks there is silent
3. `_frames_of`            packets -> decoded frames of at most two channels, with their times
4. `_runs_of`              these frames -> runs of samples without a gap, each at its time

Times are those of the pictures: FFmpeg applies edit lists, start offsets and the delays of encoders
to the time stamps of both. Frames that follow each other within `_JITTER` seconds are one run,
however coarse or uneven their time stamps are. The time of a run is the median of what its frames
say, so that rounding to milliseconds (Matroska, FLV) moves nothing.
"""

# C channels, S samples

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from dit.codecs.frame_pictures import any_title

MOST_CHANNELS = 8
"""Most channels of a track; PyAV's frames have no room for more."""
_INDEXED = ("mov", "matroska")  # formats with a table, by which FFmpeg seeks
_BEFORE = 1.0  # seconds before a span from which on it is decoded: codecs need earlier packets
_READY = 0.3  # seconds of these that must be there: 10 frames of MP3, 80 ms of Opus (RFC 7845, 4.6)
_EDGE = 0.1  # seconds beyond either end of a span that the filter of the resampler may read
_JITTER = 0.01  # seconds by which the time stamp of a frame may be wrong without a gap
_CHUNK = 1 << 16  # samples that are resampled at once


class SoundFault(StrEnum):
    """Reasons why a clip has no sound; data preparation counts each."""

    NO_TRACK = "no sound track"
    NO_SUCH_TRACK = "no sound track of that number"
    UNKNOWN_CODEC = "sound of an unknown codec"
    CHANNELS = "sound of more than eight channels"
    NOT_THERE = "sound track that has nothing at the time of the clip"
    DAMAGED = "sound that is damaged within the clip"


class SoundError(ValueError):
    """The sound of a file cannot be used, although its pictures can."""

    def __init__(self, fault: SoundFault, detail: str):
        self.fault, self.detail = fault, detail
        super().__init__(f"{fault}: {detail}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundSpan:
    """Samples of a span of a track, and how many seconds of the span the track lacks."""

    samples_CS: np.ndarray  # float32, full scale is 1; silent where the track has nothing
    late: float = 0.0  # seconds of silence before the first sample of the track
    short: float = 0.0  # seconds of silence behind its last sample
    gaps: float = 0.0  # seconds of silence between


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundTrack:
    """A sound track of a file, and the sampling rate and channels that `read_span` returns."""

    file: Path | BinaryIO
    rate: int
    """Samples per second of what `read_span` returns."""
    channels: int
    """Channels of what `read_span` returns: 1 or 2."""
    number: int
    """Index among the file's sound tracks, from 0, as in FFmpeg's `a:N`."""
    tracks: int
    """Number of sound tracks in the file."""
    file_rate: int
    """Samples per second according to the file's header."""
    file_channels: int
    """Channels according to the file's header."""
    codec: str

    @classmethod
    def of(
        cls, file: Path | BinaryIO, *, rate: int, channels: int, number: int | None = None
    ) -> Self:
        """Reads the header of a file and chooses its sound track `number`, counted from 0.

        With `number` None it is the file's default track, or else the first one. `rate` (Hz) and
        `channels` are those that `read_span` shall return.

        Raises:
            SoundError: there is no such track, or the track cannot be decoded.
            OSError: the file cannot be opened, or FFmpeg does not know its format.
            ValueError: `channels` is not 1 or 2, or `rate` is below 1.
        """
        if channels not in (1, 2) or rate < 1:
            raise ValueError(f"{channels=} must be 1 or 2, and {rate=} at least 1")
        with _opened(file) as container:
            tracks = container.streams.audio
            if not tracks:
                raise SoundError(SoundFault.NO_TRACK, "the file holds none")
            chosen = _default_of(tracks) if number is None else number
            if not 0 <= chosen < len(tracks):
                detail = f"number {chosen}; it has {len(tracks)}, counted from 0"
                raise SoundError(SoundFault.NO_SUCH_TRACK, detail)
            codec = tracks[chosen].codec_context
            if codec is None or not codec.sample_rate:
                raise SoundError(
                    SoundFault.UNKNOWN_CODEC, f"track number {chosen}; convert it with ffmpeg"
                )
            return cls(
                file=file,
                rate=rate,
                channels=channels,
                number=chosen,
                tracks=len(tracks),
                file_rate=codec.sample_rate,
                file_channels=_allowed(codec.layout.nb_channels),
                codec=codec.name,
            )

    def read_span(self, start: Fraction | float, seconds: Fraction | float) -> SoundSpan:
        """Reads round(seconds * rate) samples from the time `start` on.

        `start` is in seconds on the clock of the file.

        Raises:
            SoundError: the track has nothing in this span, or is damaged there.
        """
        begin, end = float(start), float(start + seconds)
        count = round(seconds * self.rate)
        samples_CS, is_there_S = np.zeros((self.channels, count), np.float32), np.zeros(count, bool)
        for run in self._runs(begin, end):
            run_CS = resampled(mixed(run.joined(), self.channels), run.rate, self.rate)
            first = round((run.time - begin) * self.rate)
            low, high = max(0, first), min(count, first + run_CS.shape[1])
            if low < high:
                samples_CS[:, low:high] = run_CS[:, low - first : high - first]
                is_there_S[low:high] = True
        there = np.flatnonzero(is_there_S)
        if not len(there):
            raise SoundError(SoundFault.NOT_THERE, f"{begin:.3f} to {end:.3f} s")
        if not np.isfinite(samples_CS).all():
            raise SoundError(SoundFault.DAMAGED, "NaN or Inf in its samples")
        late, short = int(there[0]), int(count - 1 - there[-1])
        return SoundSpan(
            samples_CS=samples_CS,
            late=late / self.rate,
            short=short / self.rate,
            gaps=(count - late - short - len(there)) / self.rate,
        )

    def _runs(self, begin: float, end: float) -> list[_SoundRun]:
        """Runs of samples near the span from `begin` to `end`, in seconds.

        Decoding starts `_BEFORE` seconds before the span. Where the file cannot be sought, or the
        first decoded frame is too late for that, decoding starts at the beginning of the file.
        """
        for seek_to in (begin - _BEFORE, None):
            with _opened(self.file) as container:
                stream = container.streams.audio[self.number]
                is_indexed = any(name in container.format.name for name in _INDEXED)
                if seek_to is not None and (not is_indexed or not _sought(stream, seek_to)):
                    continue
                runs, heard = _runs_of(stream, begin, end)
            if seek_to is None or heard <= begin - _READY:
                return runs
        return []


class _HeardFrame(NamedTuple):
    """A decoded frame of sound; its time, in seconds, may be unknown."""

    time: float | None  # seconds, as its time stamp says
    samples_CS: np.ndarray  # float32, of one or two channels
    rate: int


@dataclass(kw_only=True, slots=True)
class _SoundRun:
    """A run of decoded samples without a gap."""

    rate: int
    pieces: list[np.ndarray] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # times of its first sample, by each frame
    length: int = 0  # samples

    def joined(self) -> np.ndarray:
        """All samples of the run, float32 [C, S]."""
        return np.concatenate(self.pieces, axis=1)

    @property
    def time(self) -> float:
        """Time of the run's first sample, in seconds."""
        return median(self.starts)

    def continues(self, frame: _HeardFrame, tolerance: float) -> bool:
        """Whether `frame` has this run's rate and channels and begins where the run ends.

        The frame's time may be off by `tolerance` seconds. A frame of unknown time is taken to
        begin there.
        """
        if (frame.rate, len(frame.samples_CS)) != (self.rate, len(self.pieces[0])):
            return False
        at = frame.time
        return at is None or abs(at - self.length / self.rate - self.starts[0]) <= tolerance

    def add(self, samples_CS: np.ndarray, time: float | None) -> None:
        if time is not None:
            self.starts.append(time - self.length / self.rate)
        self.pieces.append(samples_CS)
        self.length += samples_CS.shape[1]


def _runs_of(stream: Any, begin: float, end: float) -> tuple[list[_SoundRun], float]:
    """The runs of samples of a stream near the span from `begin` to `end`, and when decoding began.

    All times are in seconds. The second value is the time of the first decoded frame, or the start
    of the stream if there is no frame; callers check that it precedes the span.
    """
    tolerance, runs = _JITTER + float(stream.time_base), list[_SoundRun]()
    heard, now = None, _start_of(stream)  # `now` is where the last frame ended
    for frame in _frames_of(stream, begin, end):
        time = now if frame.time is None else frame.time
        heard = time if heard is None else heard
        now = time + frame.samples_CS.shape[1] / frame.rate
        if now < begin - _EDGE:
            continue
        if time > end + _EDGE:
            break
        if runs and runs[-1].continues(frame, tolerance):
            runs[-1].add(frame.samples_CS, frame.time)
        else:
            runs.append(_SoundRun(rate=frame.rate))
            runs[-1].add(frame.samples_CS, time)
    return runs, now if heard is None else heard


def _frames_of(stream: Any, begin: float, end: float) -> Iterator[_HeardFrame]:
    """Yields the decoded frames of a stream, from the present position of its container.

    Damaged packets before `begin` or after `end` (seconds) are skipped.

    Raises:
        SoundError: a packet between `begin` and `end` (seconds) is damaged.
    """
    import av.error

    packets, now, mixers = stream.container.demux(stream), _start_of(stream), dict[Any, Any]()
    while True:
        frames, fault = [], ""
        try:
            packet = next(packets, None)
            if packet is None:
                return
            at = packet.dts if packet.pts is None else packet.pts
            now = now if at is None else float(at * packet.time_base)
            frames = packet.decode()
            fault = "it is cut" if packet.is_corrupt else ""
        except (av.error.FFmpegError, OSError, ValueError) as error:
            fault = str(error)
        if fault and begin <= now < end:
            raise SoundError(SoundFault.DAMAGED, f"the packet at {now:.3f} s: {fault}")
        for frame in frames:
            yield _HeardFrame(frame.time, _few_channels(frame, mixers), frame.sample_rate)


def _few_channels(frame: Any, mixers: dict[Any, Any]) -> np.ndarray:
    """Samples of a frame, float32 [C, S]; more than two channels are mixed into two.

    FFmpeg's matrix for the channel layout mixes them, which preserves the loudness of the front
    channels. `mixers` caches resamplers by (format, layout, rate). The frame's time stamp is set to
    None, so read it before.
    """
    import av

    channels = _allowed(frame.layout.nb_channels)
    form = frame.format.name, frame.layout.name, frame.sample_rate
    if form not in mixers:
        layout = "mono" if channels == 1 else "stereo"
        mixers[form] = av.AudioResampler("flt", layout, frame.sample_rate)
    frame.pts = None  # the mixer would fill what time stamps leave out
    packed = [one.to_ndarray() for one in mixers[form].resample(frame)]
    return np.concatenate(packed, axis=1).reshape(-1, min(2, channels)).T


def mixed(samples_CS: np.ndarray, channels: int) -> np.ndarray:
    """Converts mono or stereo samples [C, S] to `channels` channels.

    Mono is copied to both channels of stereo; mono of stereo is the mean of its channels.
    """
    if channels < len(samples_CS):
        return samples_CS.mean(0, keepdims=True)
    return np.broadcast_to(samples_CS, (channels, samples_CS.shape[1]))


def resampled(samples_CS: np.ndarray, old: int, new: int) -> np.ndarray:
    """Resamples a waveform [C, S] from `old` to `new` Hz; its first sample keeps its time."""
    import av

    if old == new:
        return samples_CS
    layout = "mono" if len(samples_CS) == 1 else "stereo"
    resampler, found = av.AudioResampler("flt", layout, new), list[Any]()
    for at in range(0, samples_CS.shape[1], _CHUNK):
        packed = np.ascontiguousarray(samples_CS[:, at : at + _CHUNK].T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate = old
        found += resampler.resample(frame)
    found += resampler.resample(None)
    packed = [np.zeros((1, 0), np.float32), *(frame.to_ndarray() for frame in found)]
    return np.concatenate(packed, axis=1).reshape(-1, len(samples_CS)).T


@contextmanager
def _opened(file: Path | BinaryIO) -> Iterator[Any]:
    """A context with the PyAV container in `file`; metadata in any encoding raise no error.

    A stream is read from its first byte and stays open afterwards; a file of a path is closed.
    """
    import av

    stream = file.open("rb") if isinstance(file, Path) else file
    try:
        stream.seek(0)
        with av.open(stream, "r", **any_title()) as container:
            yield container
    finally:
        if isinstance(file, Path):
            stream.close()


def _sought(stream: Any, time: float) -> bool:
    """Seeks the container to a packet of `stream` at or before `time`, in seconds.

    Returns False, without seeking, if the stream begins at `time` or later, or if seeking fails.
    """
    import av.error

    if time <= _start_of(stream):
        return False
    try:
        stream.container.seek(int(time / stream.time_base), stream=stream)
    except (av.error.FFmpegError, OSError):
        return False
    return True


def _start_of(stream: Any) -> float:
    return float((stream.start_time or 0) * stream.time_base)


def _default_of(tracks: Any) -> int:
    """Index of the first of `tracks` that the file marks as default; 0 if it marks none."""
    from av.stream import Disposition

    told = (n for n, track in enumerate(tracks) if track.disposition & Disposition.default)
    return next(told, 0)


def _allowed(channels: int) -> int:
    if channels > MOST_CHANNELS:
        raise SoundError(SoundFault.CHANNELS, f"{channels} channels; mix them to fewer with ffmpeg")
    return channels
