"""Real clips with sound, made on the spot: where the picture turns white, a chirp begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

CHIRP = 0.25  # seconds
CODECS = {
    ".mp4": ("libx264", "aac"), ".mov": ("libx264", "pcm_s16be"), ".mkv": ("libx264", "libopus"),
    ".webm": ("libvpx", "libopus"), ".avi": ("mpeg4", "pcm_s16le"), ".ts": ("libx264", "aac"),
    ".mpg": ("mpeg2video", "mp2"), ".flv": ("libx264", "aac"), ".wmv": ("wmv2", "wmav2"),
    ".ogv": ("libvpx", "libopus"), ".m4v": ("libx264", "aac"),
}  # fmt: skip


def chirp(times: np.ndarray) -> np.ndarray:
    """A tone of 400 to 1,400 Hz in the first `CHIRP` seconds; silence before and after."""
    phase = 2 * np.pi * (400 + 2000 * times) * times
    return np.where((times >= 0) & (times < CHIRP), 0.5 * np.sin(phase), 0).astype(np.float32)


def heard_at(samples_S: np.ndarray, rate: int) -> float:
    """The time at which the chirp begins, in seconds from the first sample; finer than samples."""
    margin = round(0.02 * rate)
    wanted = chirp(np.arange(-margin, round(CHIRP * rate) + margin) / rate)
    match = np.correlate(samples_S, wanted, "full")
    at = int(match.argmax())
    left, most, right = match[at - 1 : at + 2]
    peak = at + 0.5 * (left - right) / (left - 2 * most + right)
    return (peak - (len(wanted) - 1) + margin) / rate


@dataclass(frozen=True, kw_only=True)
class Sound:
    """One sound track of a clip that is made."""

    rate: int = 44100
    layout: str = "stereo"
    codec: str = ""  # that of the file's ending, where it is empty
    begin: float = 0.0  # seconds on the clock of the clip
    end: float = 3.0
    shift: float = 0.0  # seconds by which the chirp is late
    hole: tuple[float, float] = (0.0, 0.0)  # what is left out
    is_default: bool = False
    level: float = 1.0
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SoundClip:
    """How a clip is made: its frames, its sound, its container."""

    ending: str = ".mp4"
    sounds: tuple[Sound, ...] = (Sound(),)
    fps: float = 25.0
    begin: float = 0.0  # seconds at which the picture begins
    end: float = 3.0
    white: float = 1.2  # seconds at which the picture turns white and the chirp begins
    offset: float = 0.0  # seconds that are added to all time stamps
    times: tuple[float, ...] = ()  # of frames, instead of `fps`
    video: str = ""
    options: dict[str, str] = field(default_factory=dict)
    muxer: dict[str, str] = field(default_factory=dict)
    format: str | None = None

    def frame_times(self) -> list[float]:
        count = round((self.end - self.begin) * self.fps)
        return list(self.times) or [self.begin + number / self.fps for number in range(count)]


def make_clip(path: Path, clip: SoundClip) -> Path:
    """Writes a clip; packets of all streams are interleaved by their times."""
    of_video, of_sound = CODECS[clip.ending]
    with av.open(str(path), "w", options=clip.muxer, format=clip.format) as container:
        film = container.add_stream(
            clip.video or of_video, rate=Fraction(clip.fps).limit_denominator(1001)
        )
        film.width, film.height, film.pix_fmt = 32, 32, "yuv420p"
        film.codec_context.options = {"preset": "ultrafast", **clip.options}
        if clip.times:
            film.codec_context.time_base = Fraction(1, 1000)
        tracks = [_add_track(container, sound, of_sound) for sound in clip.sounds]
        packets = list(_film_packets(film, clip))
        for track, sound in zip(tracks, clip.sounds, strict=True):
            packets += _sound_packets(track, sound, clip)
        for _, packet in sorted(packets, key=lambda one: one[0]):
            container.mux(packet)
    return path


def _add_track(container: Any, sound: Sound, codec: str) -> Any:
    from av.stream import Disposition

    track = container.add_stream(sound.codec or codec, rate=sound.rate, options=sound.options)
    track.layout = sound.layout
    track.disposition = Disposition.default if sound.is_default else Disposition(0)
    return track


def _film_packets(film: Any, clip: SoundClip) -> Iterator[tuple[float, Any]]:
    unit = Fraction(1, 1000) if clip.times else 1 / Fraction(clip.fps).limit_denominator(1001)
    frames = []
    for time in clip.frame_times():
        grey = np.full((32, 32), 235 if time >= clip.white - 1e-6 else 16, np.uint8)
        frame = av.VideoFrame.from_ndarray(grey, format="gray").reformat(format="yuv420p")
        frame.pts, frame.time_base = round((time + clip.offset) / unit), unit
        frames.append(frame)
    for frame in [*frames, None]:
        for packet in film.encode(frame):
            yield float(packet.dts * packet.time_base), packet


def _sound_packets(track: Any, sound: Sound, clip: SoundClip) -> Iterator[tuple[float, Any]]:
    rate = sound.rate
    first, count = round(sound.begin * rate), round((sound.end - sound.begin) * rate)
    times = (first + np.arange(count)) / rate - clip.white - sound.shift
    layout = av.AudioLayout(sound.layout)
    samples = np.repeat(sound.level * chirp(times)[:, None], layout.nb_channels, axis=1)
    frames, size = list[Any](), track.codec_context.frame_size or 1024
    for at in range(0, count, size):
        low, high = sound.hole
        if low <= (first + at) / rate < high:
            continue
        packed = np.ascontiguousarray(samples[at : at + size]).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=sound.layout)
        frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
        frame.pts = first + at + round(clip.offset * rate)
        frames.append(frame)
    for frame in [*frames, None]:
        for packet in track.encode(frame):
            if packet.pts is not None:
                yield float(packet.dts * packet.time_base), packet


def spoil(file: Path, begin: float, end: float) -> None:
    """Overwrites the sound between two times with noise."""
    content, rng = bytearray(file.read_bytes()), np.random.default_rng(1)
    with av.open(str(file)) as container:
        for packet in container.demux(container.streams.audio[0]):
            at = None if packet.pts is None else packet.pts * packet.time_base
            if packet.size and packet.pos is not None and at is not None and begin <= at < end:
                content[packet.pos : packet.pos + packet.size] = rng.bytes(packet.size)
    file.write_bytes(content)
