"""Videos with sound on disk: in step, as long as their frames, and to the bit as WAV."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from data_prep.media.videos import frames, timeline
from dit.codecs.sound import SOUND_LATENT
from dit.codecs.sound.files import AAC_FRAME, Waveform, aac_rate, wav_file, waveform_picture
from dit.codecs.sound.tracks import SoundTrack
from dit.codecs.sound.wave import Wave
from dit.codecs.vae import Pixel
from dit.playground.studio import heard
from dit.report.pictures import generated
from dit.sampling.commands.decode_latents import main
from dit.sampling.media_files import Picture, make_folder, write_media
from tests.sound_files import chirp, heard_at

MUTE = Picture(frames_FHW3=np.zeros((2, 8, 8, 3), np.uint8), prompt="", seed=0, settings={"fps": 8})
WHITE = 6  # the frame at which the picture turns white and the chirp begins


def sounding(rate: int, fps: float, count: int = 24, channels: int = 1, **given: Any) -> Picture:
    """A clip that turns white where its chirp begins."""
    video = np.zeros((count, 32, 32, 3), np.uint8)
    video[WHITE:] = 255
    times = np.arange(round(count / fps * rate)) / rate
    samples_CS = np.repeat(chirp(times - WHITE / fps)[None], channels, axis=0)
    sound = Waveform(samples_CS=samples_CS, rate=rate)
    settings = {"fps": fps}
    return Picture(frames_FHW3=video, prompt="", seed=0, settings=settings, sound=sound, **given)


def length(file: Path) -> tuple[int, int]:
    """Samples that the sound track of a file decodes to, and its rate."""
    with av.open(str(file)) as container:
        found = [frame.samples for frame in container.decode(audio=0)]
        return sum(found), container.streams.audio[0].codec_context.sample_rate


CASES = [
    (4_000, 8.0, 1),
    (16_000, 24.0, 2),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in [(24_000, 30_000 / 1001, 1), (48_000, 12.5, 2), (100_000, 24.0, 1)]
    ),
]


@pytest.mark.parametrize(("rate", "fps", "channels"), CASES)
def test_sound_is_in_step_and_as_long_as_its_frames(
    tmp_path: Path, rate: int, fps: float, channels: int
) -> None:
    made = sounding(rate, fps, channels=channels)
    written = write_media([made], tmp_path)
    assert not written.lost and not written.notes
    file = tmp_path / "00000.mp4"
    line = timeline(file)
    pictures = [np.asarray(one).mean() for one in frames(file, line.shown)]
    white = next(number for number, level in enumerate(pictures) if level > 128)
    assert white == WHITE and line.fps == pytest.approx(fps, rel=1e-4)
    found, of_file = length(file)
    wanted = len(pictures) / fps * of_file
    assert of_file == aac_rate(rate) and wanted - 1 <= found <= wanted + AAC_FRAME
    track = SoundTrack.of(file, rate=16_000, channels=channels)
    assert track.file_channels == channels
    span = track.read_span(line.shown[0] * line.tick, line.duration)
    for samples_S in span.samples_CS:
        assert abs(heard_at(samples_S, 16_000) - white / fps) <= 1e-3


def test_rates_that_aac_lacks_go_to_the_next_higher_one() -> None:
    rates = {4_000: 7_350, 7_350: 7_350, 10_000: 11_025, 44_100: 44_100, 50_000: 64_000}
    assert {rate: aac_rate(rate) for rate in rates} == rates
    assert aac_rate(192_000) == 96_000


def test_a_wav_has_every_bit(tmp_path: Path) -> None:
    samples_CS = np.random.default_rng(0).normal(size=(2, 999)).astype(np.float32)
    (tmp_path / "a.wav").write_bytes(wav_file(samples_CS, 12_345))
    with av.open(str(tmp_path / "a.wav")) as container:
        stream = container.streams.audio[0]
        assert (stream.codec_context.name, stream.codec_context.sample_rate) == (
            "pcm_f32le",
            12_345,
        )
        read = np.concatenate([f.to_ndarray() for f in container.decode(stream)], axis=1)
    assert np.array_equal(read.reshape(-1, 2).T, samples_CS)


def test_files_are_listed_and_replaced(tmp_path: Path) -> None:
    write_media([sounding(8_000, 24.0, keeps_wav=True)], tmp_path)
    (entry,) = json.loads((tmp_path / "samples.json").read_bytes())
    assert (entry["wav"], entry["waveform"], entry["sound_rate"]) == (
        "00000.wav",
        "00000.webp",
        8_000,
    )
    make_folder(tmp_path, count=1)  # they are of an earlier generation, no files of others
    written = write_media([MUTE], tmp_path)
    assert "00000.wav" in str(written.notes[0]) and "00000.webp" in str(written.notes[0])
    assert not (tmp_path / "00000.wav").exists() and not (tmp_path / "00000.webp").exists()
    with av.open(str(tmp_path / "00000.mp4")) as container:
        assert not container.streams.audio


@pytest.fixture
def latents(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A folder of saved latents of a clip with sound, and its waveform."""
    video, sound = Pixel.of(block=4, colours=3), Wave(wave_rate=8_000, wave_channels=1, frame=96)
    waveform_CS = torch.rand(1, 4_000) * 2 - 1
    card = {
        "format_version": 1,
        "processor": {"name": "pixel", **video.settings},
        "latent": {"mean": video.whitening.mean, "std": video.whitening.std},
        "audio_processor": {"name": "wave", **sound.settings},
        SOUND_LATENT: {"scale": 1.0},
    }
    tensors = {"latent": torch.zeros(48, 4, 4, 4), "sound_latent": sound.encode(waveform_CS)}
    save_file(tensors, tmp_path / "00000.safetensors")
    entry = {"prompt": "a", "seed": 1, "latent": "00000.safetensors", "fps": 8.0}
    (tmp_path / "samples.json").write_text(json.dumps([entry]))
    (tmp_path / "dataset_card.json").write_text(json.dumps(card))
    return tmp_path, waveform_CS


def test_saved_latents_are_decoded_with_their_sound(latents, tmp_path: Path) -> None:
    folder, waveform_CS = latents
    out = tmp_path / "out"
    assert main(["--latents", str(folder), "--output_dir", str(out), "--save_wav"]) == 0
    assert (out / "00000.wav").read_bytes() == wav_file(waveform_CS.numpy(), 8_000)
    assert length(out / "00000.mp4")[0] >= 4_000
    plain = tmp_path / "plain"
    assert main(["--latents", str(folder), "--output_dir", str(plain)]) == 0
    assert not (plain / "00000.wav").exists()


def test_the_report_shows_the_waveform_and_plays(tmp_path: Path) -> None:
    write_media([sounding(8_000, 24.0)], tmp_path)
    page = generated(tmp_path, [])
    assert page.count("<video controls loop preload") == 1
    assert '<img src="data:image/webp;base64,' in page and 'alt="waveform: ' in page
    write_media([MUTE], tmp_path)
    page = generated(tmp_path, [])
    assert page.count("<video controls loop muted preload") == 1 and "waveform" not in page


def test_the_playground_gets_both() -> None:
    made = sounding(8_000, 24.0)
    assert made.sound is not None
    found = heard(made.sound)
    assert found["sound"].startswith("data:audio/mp4;base64,")
    assert base64.b64decode(found["sound"].partition(",")[2])[4:8] == b"ftyp"
    assert found["waveform"].startswith("data:image/webp;base64,")


def test_a_waveform_is_drawn_where_it_is_loud(tmp_path: Path) -> None:
    samples_CS = np.zeros((2, 1000), np.float32)
    samples_CS[0, 500:] = np.tile([0.9, -0.9], 250)
    (tmp_path / "a.webp").write_bytes(waveform_picture(samples_CS, width=100, height=20))
    with Image.open(tmp_path / "a.webp") as image:
        inked = (np.asarray(image.convert("L")) < 200).sum(0)
        lanes = np.asarray(image.convert("L")) < 200
    assert image.size == (100, 40)
    assert (inked[:45] <= 4).all() and (inked[55:] >= 18).all()
    assert lanes[20:].sum(0).max() <= 2  # the second channel is silent
