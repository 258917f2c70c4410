"""Sound tracks: which one is taken, what stops it, what is mixed and resampled, and what is not."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest

from dit.codecs.sound.tracks import SoundError, SoundFault, SoundTrack, mixed, resampled
from tests.media_files import video
from tests.sound_files import Sound, SoundClip, make_clip, spoil

RATE = 16_000


def read(file: Path, start: float = 0.0, seconds: float = 1.0, **given: int) -> np.ndarray:
    track = SoundTrack.of(file, **{"rate": RATE, "channels": 1, **given})
    return track.read_span(start, seconds).samples_CS


def wave_file(path: Path, samples_CS: np.ndarray, rate: int, layout: str) -> Path:
    """A WAV file of 16-bit samples."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=rate, layout=layout)
        packed = np.ascontiguousarray(samples_CS.T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def fault_of(file: Path, start: float = 0.0, seconds: float = 1.0, **given: int) -> SoundFault:
    with pytest.raises(SoundError) as caught:
        read(file, start, seconds, **given)
    return caught.value.fault


def test_what_has_no_sound_is_named(tmp_path: Path) -> None:
    assert fault_of(video(tmp_path / "mute.mp4", 5)) is SoundFault.NO_TRACK
    many = Sound(rate=48_000, layout="7.1.2", codec="pcm_s16le")
    file = make_clip(tmp_path / "many.mkv", SoundClip(ending=".mkv", sounds=(many,), end=0.2))
    assert fault_of(file) is SoundFault.CHANNELS
    file = make_clip(tmp_path / "one.mp4", SoundClip(sounds=(Sound(end=0.5),), end=0.2))
    assert fault_of(file, number=1) is SoundFault.NO_SUCH_TRACK
    assert fault_of(file, start=2.0) is SoundFault.NOT_THERE


def test_damage_counts_where_it_is(tmp_path: Path) -> None:
    file = make_clip(tmp_path / "clip.mp4", SoundClip())
    whole = read(file, 1.0)
    spoil(file, 0.4, 0.5)
    assert fault_of(file) is SoundFault.DAMAGED
    assert np.abs(read(file, 1.0) - whole).max() < 1e-6  # a second later it is as it was
    with pytest.raises(SoundError, match=r"the packet at 0\.\d+ s"):
        read(file, 0.3, 0.4)


def test_samples_of_the_same_rate_are_exact(tmp_path: Path) -> None:
    levels_CS = np.random.default_rng(0).integers(-(2**15), 2**15, (2, RATE)).astype(np.int16)
    file = wave_file(tmp_path / "noise.wav", levels_CS, RATE, "stereo")
    assert np.array_equal(read(file, channels=2) * 2**15, levels_CS)
    assert np.array_equal(read(file, 0.25, 0.5) * 2**16, levels_CS.sum(0)[None, 4000:12_000])
    track = SoundTrack.of(io.BytesIO(file.read_bytes()), rate=RATE, channels=2)
    assert np.array_equal(track.read_span(0, 1).samples_CS * 2**15, levels_CS)


def test_six_channels_are_mixed_as_ffmpeg_does(tmp_path: Path) -> None:
    """ITU-R BS.775-3, table 2: centre and surround with 3 dB less; without the low frequencies."""
    levels_CS = np.zeros((6, RATE), np.int16)
    levels_CS[:] = [[1000], [2000], [3000], [4000], [5000], [6000]]  # FL FR FC LFE BL BR
    file = wave_file(tmp_path / "six.wav", levels_CS, RATE, "5.1")
    half = 0.5**0.5
    wanted = np.array([1000 + half * (3000 + 5000), 2000 + half * (3000 + 6000)]) / 2**15
    assert read(file, channels=2)[:, 500] == pytest.approx(wanted, rel=1e-5)
    assert read(file)[:, 500] == pytest.approx(wanted.mean(), rel=1e-5)


def test_the_default_track_is_taken(tmp_path: Path) -> None:
    sounds = (Sound(rate=48_000), Sound(rate=48_000, is_default=True))
    clip = SoundClip(ending=".mkv", sounds=sounds, end=0.2)
    track = SoundTrack.of(make_clip(tmp_path / "two.mkv", clip), rate=RATE, channels=1)
    assert (track.number, track.tracks) == (1, 2)


def test_resampling_moves_nothing() -> None:
    times = np.arange(44_100) / 44_100
    tone_CS = np.sin(2 * np.pi * 440 * times)[None].astype(np.float32)
    for rate in (8_000, 16_000, 48_000, 44_100):
        found_CS = resampled(tone_CS, 44_100, rate)
        wanted = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
        assert abs(found_CS.shape[1] - rate) <= 1
        inside = slice(rate // 20, rate - rate // 20)
        assert np.abs(found_CS[0, inside] - wanted[inside]).max() < 2e-3


def test_channels_go_to_and_fro() -> None:
    mono_CS = np.arange(4, dtype=np.float32)[None]
    assert np.array_equal(mixed(mixed(mono_CS, 2), 1), mono_CS)
    assert mixed(np.array([[1.0, 0], [0, 3]]), 1).tolist() == [[0.5, 1.5]]
