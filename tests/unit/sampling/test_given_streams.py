"""Files of given frames and given sound: their latents are those of packing, and come back."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from dit.codecs.sound import SOUND_LATENT
from dit.codecs.sound.files import wav_file
from dit.codecs.sound.wave import Wave
from dit.codecs.vae import Pixel
from dit.models.registry import named_model
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.conditions.stream_files import StreamFiles
from dit.sampling.latent_sizes import LatentStride
from dit.sampling.media_files import waveform_of
from dit.sampling.prompts import read_prompts
from examples.digits.kinds import written_clips
from tests.sounding import sound_model

RATE, FRAME, FPS = 4000, 100, 8.0
WAVE = Wave(wave_rate=RATE, wave_channels=1, frame=FRAME, scale=0.25)
PIXEL = Pixel.of(block=4, colours=3)
MODEL = sound_model(
    in_channels=48, patch_spatial=1, patch_temporal=3, sound_channels=FRAME, sound_rate=RATE / FRAME
)
SIZE = (9, 8, 8)


def opened(**changes: Any) -> Any:
    """What a run on clips of 4 x 4 pixels in a cell, with waves of 100 samples, opens."""
    processor = {"name": WAVE.name, **WAVE.settings}
    latent = {"channels": WAVE.channels, "dtype": "float32", "scale": WAVE.scale}
    parts = {
        "config": SimpleNamespace(model=MODEL),
        "card": {"format_version": 1, "audio_processor": processor, SOUND_LATENT: latent},
        "decoder": PIXEL,
        "latent_stride": LatentStride.of(PIXEL, MODEL),
        "path": Path("runs/films"),
    }
    return SimpleNamespace(**(parts | changes))


def wave_of(seconds: float, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(-0.9, 0.9, (1, round(seconds * RATE))).astype(np.float32)


def wav_of(seconds: float, folder: Path) -> tuple[str, np.ndarray]:
    file, wave_CS = folder / "given.wav", wave_of(seconds)
    file.write_bytes(wav_file(wave_CS, RATE))
    return str(file), wave_CS


def clip_of(frames: int, folder: Path) -> tuple[str, np.ndarray]:
    rng = np.random.default_rng(1)
    clip_FHW3 = rng.integers(0, 256, (frames, *SIZE[1:], 3)).astype(np.uint8)
    (file,) = written_clips([clip_FHW3], folder)
    return file, clip_FHW3


def request(files: StreamFiles, **changes: Any) -> Any:
    files.check(opened(), frames=SIZE[0])
    return files.request(opened(**changes), size=SIZE, fps=FPS)


@pytest.mark.parametrize("seconds", [1.125, 3.0])
def test_a_given_sound_comes_back_to_the_bit(seconds: float, tmp_path: Path) -> None:
    file, wave_CS = wav_of(seconds, tmp_path)
    made = request(StreamFiles(sound_of=file))
    first_CS = wave_CS[:, : 9 * RATE // 8]
    assert made.frames == 45 and made.given_CFHW is None
    assert torch.equal(made.given_KA, WAVE.encode(torch.from_numpy(first_CS)))
    heard = waveform_of(made.inputs(MODEL)["sound"], WAVE, SIZE[0] / FPS)
    assert np.array_equal(heard.samples_CS, first_CS)


def test_given_frames_come_back_to_the_level(tmp_path: Path) -> None:
    file, clip_FHW3 = clip_of(12, tmp_path)
    made = request(StreamFiles(frames_of=file))
    assert made.frames == 45 and made.given_KA is None
    latent_CFHW = made.video(torch.zeros(48, 9, 2, 2))
    assert np.array_equal(PIXEL.decode(latent_CFHW).numpy(), clip_FHW3[:9])


def test_short_files_give_beginnings_of_whole_tokens(tmp_path: Path) -> None:
    (clip, clip_FHW3), (sound, wave_CS) = clip_of(8, tmp_path), wav_of(0.51, tmp_path)
    made = request(StreamFiles(frames_of=clip, sound_of=sound))
    # 6 of 8 frames are two tokens; 2,040 samples are 20 whole latent frames.
    assert made.given_CFHW.shape[1] == 6 and made.given_KA.shape == (FRAME, 20)
    assert np.array_equal(PIXEL.decode(made.given_CFHW).numpy(), clip_FHW3[:6])
    assert np.array_equal(WAVE.decode(made.given_KA).numpy(), wave_CS[:, :2000])
    said = StreamFiles(frames_of=clip).notes(opened(), size=SIZE, fps=FPS)
    assert [one.partition(" gives ")[2] for one in said] == [
        "the first 6 of 9 frames; the rest is generated"
    ]


def test_the_sound_of_a_video_begins_with_its_picture(tmp_path: Path) -> None:
    """One that begins late on the clock of its file, after its sound."""
    file, wave_CS = tmp_path / "late.mkv", wave_of(3.0)
    with av.open(str(file), "w") as container:
        film = container.add_stream("ffv1", rate=8, options={"level": "3"})
        film.height, film.width, film.pix_fmt = 8, 8, "bgr0"
        film.codec_context.time_base = Fraction(1, 8)
        track = container.add_stream("pcm_f32le", rate=RATE, layout="mono")
        for number in range(9):
            frame = av.VideoFrame.from_ndarray(np.zeros((8, 8, 3), np.uint8), "rgb24")
            frame.pts, frame.time_base = number + 4, Fraction(1, 8)
            container.mux(film.encode(frame))
        container.mux(film.encode())
        heard = av.AudioFrame.from_ndarray(wave_CS, format="flt", layout="mono")
        heard.sample_rate, heard.pts, heard.time_base = RATE, 0, Fraction(1, RATE)
        container.mux(track.encode(heard))
        container.mux(track.encode())
    made = request(StreamFiles(sound_of=str(file)))
    begin = RATE // 2
    found = WAVE.decode(made.given_KA, 4500).numpy()
    assert np.array_equal(found, wave_CS[:, begin : begin + 4500])


def test_a_clip_of_another_rate_is_named(tmp_path: Path) -> None:
    file, _ = clip_of(9, tmp_path)
    (said,) = StreamFiles(frames_of=file).notes(opened(), size=SIZE, fps=24.0)
    assert said.endswith("has 8 frames a second, and the sound is made for 24: give --fps 8")
    assert StreamFiles(frames_of=file).notes(opened(), size=SIZE, fps=8.0) == []


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    (clip, _), (sound, _) = clip_of(9, tmp_path), wav_of(2.0, tmp_path)
    short, _ = clip_of(2, tmp_path / "..")
    empty = tmp_path / "empty.wav"
    empty.write_bytes(wav_file(np.zeros((1, 50), np.float32), RATE))
    for files, message, changes in (
        (StreamFiles(frames_of=clip, sound_of=sound), "nothing is left to generate", {}),
        (StreamFiles(frames_of=short), r"is too short \(2 of the at least 3 frames", {}),
        (StreamFiles(sound_of=str(empty)), "is too short: .* one latent frame of sound", {}),
        (StreamFiles(sound_of=clip), "cannot be read as sound .*no sound track", {}),
        (StreamFiles(sound_of="gone.wav"), "--sound_of gone.wav cannot be read as sound", {}),
        (StreamFiles(sound_of=sound), "names no sound codec", {"card": {}}),
        (StreamFiles(frames_of=clip), "VAE of the data is not on this machine", {"decoder": None}),
        (StreamFiles(frames_of=sound), "is not named like a video", {}),
        (
            StreamFiles(frames_of=clip, place="p.jsonl, line 2: ", sound_of=sound),
            "^p.jsonl, line 2",
            {},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            request(files, **changes)
    with pytest.raises(ValueError, match="a picture has no sound"):
        StreamFiles(sound_of=sound).check(opened(), frames=1)
    silent = SimpleNamespace(model=named_model("wan2.1_t2v_1.3b"))
    with pytest.raises(ValueError, match=r"--sound_of .*model.family=wan generates no sound"):
        StreamFiles(sound_of=sound).check(opened(config=silent), frames=9)


def test_files_of_prompts_name_them(tmp_path: Path) -> None:
    (clip, _), (sound, _) = clip_of(9, tmp_path), wav_of(2.0, tmp_path)
    file = tmp_path / "prompts.jsonl"
    rows = [
        '{"caption": "a", "frames_path": "00000.mkv"}',
        '{"caption": "b", "sound_path": "given.wav"}',
    ]
    file.write_text("\n".join(rows))
    first, second = read_prompts(file)
    assert (first.frames_of, first.sound_of, first.unused) == (clip, None, ())
    assert (second.frames_of, second.sound_of) == (None, sound)
    assert StreamFiles.of(GenerationOptions(), "") == StreamFiles()
