"""The sound of videos: which samples get it, to the bit, and what is said of the others."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import safetensors.torch
import torch

from data_prep.cli.parser import main
from data_prep.media.clips import Entry, PlannedSound
from dit.codecs import sound
from dit.codecs.dataset_card import CodecError, read_card
from dit.codecs.sound.sound_part import PART, read_sound
from dit.codecs.sound.wave import Wave
from tests.media_files import video
from tests.sound_files import Sound, SoundClip, make_clip, spoil

RATE = 8_000
WAVE = ("--audio_processor", "wave", "--wave_rate", str(RATE))
FEW = ("--split", "1,0,0", "--num_workers", "0", "--text_width", "16", "--minutes", "0")


def pack(root: Path, *arguments: object, out: str = "out") -> int:
    paths = ("--video_dir", str(root / "clips"), "--output_dir", str(root / out))
    return main(["video", *paths, *FEW, *map(str, arguments)])


def clip(root: Path, name: str, sound: Sound | None = None, **given: Any) -> Path:
    """A clip of 0.8 seconds with one sound track."""
    (root / "clips").mkdir(exist_ok=True)
    short = {"end": 0.8, "white": 0.3, "sounds": (sound or Sound(end=0.8),)} | given
    path = root / "clips" / name
    return make_clip(path, SoundClip(ending=path.suffix, **short))


def exact_clip(path: Path, levels_CS: np.ndarray) -> None:
    """A clip of 5 frames at 10 a second whose sound has these levels."""
    path.parent.mkdir(exist_ok=True)
    layout = "mono" if len(levels_CS) == 1 else "stereo"
    with av.open(str(path), "w") as container:
        film = container.add_stream("libx264", rate=10)
        film.width, film.height, film.pix_fmt = 32, 32, "yuv420p"
        track = container.add_stream("pcm_s16le", rate=RATE, layout=layout)
        for number in range(5):
            grey = np.full((32, 32), 40 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="gray").reformat(format="yuv420p")
            frame.pts = number
            container.mux(film.encode(frame))
        container.mux(film.encode(None))
        packed = np.ascontiguousarray(levels_CS.T).reshape(1, -1)
        heard = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        heard.sample_rate, heard.pts = RATE, 0
        container.mux(track.encode(heard))
        container.mux(track.encode(None))


def samples_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Files and `.json` of each sample by the name of its clip."""
    found: dict[str, dict[str, Any]] = {}
    for shard in sorted(folder.glob("train/*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                found.setdefault(key, {})[part] = tar.extractfile(member).read()  # type: ignore[union-attr]
    named = ({"about": json.loads(parts["json"]), **parts} for parts in found.values())
    return {one["about"]["source"]: one for one in named}


def with_sound(folder: Path) -> set[str]:
    return {name for name, one in samples_of(folder).items() if PART in one}


@pytest.mark.parametrize("channels", [1, 2])
def test_samples_come_back_to_the_bit(tmp_path: Path, channels: int) -> None:
    levels_CS = np.random.default_rng(0).integers(-(2**15), 2**15, (channels, RATE // 2))
    exact_clip(tmp_path / "clips" / "a.mkv", levels_CS.astype(np.int16))
    assert pack(tmp_path, *WAVE, "--wave_channels", channels, "--wave_frame", 96) == 0
    (one,), card = samples_of(tmp_path / "out").values(), read_card(tmp_path / "out")
    codec, stored = sound.sound_codec_of_card(card), read_sound(one, one["about"])
    assert codec is not None and stored is not None
    assert stored.latent_KA.shape == (96 * channels, 42)  # 4,000 samples and 32 of silence
    assert torch.equal(stored.waveform(codec) * 2**15, torch.from_numpy(levels_CS).float())
    assert one["about"]["sound"] == {"rate": RATE, "channels": channels, "samples": RATE // 2}
    assert 0.7 < stored.latent_KA.std() < 1.5  # a power of two next to the deviation


def test_what_has_sound_what_has_none_and_why(tmp_path: Path, capsys) -> None:
    clip(tmp_path, "good.mp4")
    clip(tmp_path, "late.mp4", Sound(begin=0.4, end=0.8))
    clip(tmp_path, "short.mp4", Sound(end=0.5))
    clip(tmp_path, "quiet.mp4", Sound(end=0.8, level=0))
    clip(tmp_path, "two.mp4", sounds=(Sound(end=0.8),) * 2)
    spoil(clip(tmp_path, "bad.mp4"), 0.3, 0.5)
    ten = Sound(end=0.8, rate=48_000, layout="7.1.2", codec="pcm_s16le")
    clip(tmp_path, "ten.mkv", ten)
    video(tmp_path / "clips" / "mute.mp4", 8, size=(32, 32))
    (tmp_path / "clips" / "alone.wav").write_bytes(b"RIFF")
    assert pack(tmp_path, *WAVE, "--plan") == 0
    entries = [Entry.from_line(line) for line in (tmp_path / "out/plan.jsonl").open()]
    by_name = {entry.source: entry for entry in entries}
    assert by_name["late.mp4"].sound == PlannedSound(begin=0.0, seconds=0.8, track=0)
    assert by_name["mute.mp4"].sound is by_name["ten.mkv"].sound is None
    page = (tmp_path / "out/plan.html").read_text()
    assert page.count('"waveform":"data:image/webp') == page.count('"sound":"data:audio/mp4') == 5
    assert "seconds of sound, at 8,000 Hz" in page
    planned = capsys.readouterr().out
    assert pack(tmp_path, *WAVE) == 0
    said = {
        "5 x with sound",
        "1 x without sound: no sound track",
        "1 x without sound: sound of more than eight channels",
        "1 x without sound: sound that is damaged within the clip",
        "1 x sound that begins after the clip: silence before it",
        "1 x sound that ends before the clip: silence after it",
        "1 x sound that is silent from beginning to end",
        "1 x number 0 of 2 sound tracks is taken (--audio_track)",
    }
    packed = capsys.readouterr().out
    for line in said:
        assert f"planned: {line}" in planned and f"packed: {line}" in packed
    assert "1 x *.wav (sound without pictures makes no sample" in packed
    have = {"good.mp4", "late.mp4", "short.mp4", "quiet.mp4", "two.mp4"}
    assert with_sound(tmp_path / "out") == have
    page = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "out"), "--html", str(page)]) == 0
    assert "5 samples with sound, 4.0 s in all" in capsys.readouterr().out
    assert page.read_text().count('"waveform":"data:image/webp') == 5


@pytest.mark.slow
def test_missing_and_silent_sound(tmp_path: Path, capsys) -> None:
    clip(tmp_path, "good.mp4")
    clip(tmp_path, "quiet.mp4", Sound(end=0.8, level=0))
    video(tmp_path / "clips" / "mute.mp4", 8, size=(32, 32))
    assert pack(tmp_path, *WAVE, "--silent", "drop") == 0
    assert with_sound(tmp_path / "out") == {"good.mp4"}
    assert pack(tmp_path, *WAVE, "--missing_audio", "silence", out="silence") == 0
    found = samples_of(tmp_path / "silence")
    assert with_sound(tmp_path / "silence") == set(found) and len(found) == 3
    latent_KA = safetensors.torch.load(found["mute.mp4"][PART])["latent"]
    assert latent_KA.shape == (160, 40) and not latent_KA.any()
    refuse = ("--missing_audio", "refuse", "--max_bad_fraction", "0.5")
    assert pack(tmp_path, *WAVE, *refuse, out="refuse") == 0
    assert set(samples_of(tmp_path / "refuse")) == {"good.mp4", "quiet.mp4"}
    assert "sound is missing or cannot be used: mute.mp4" in capsys.readouterr().out


def test_without_the_option_shards_are_as_they_were(tmp_path: Path, capsys) -> None:
    clip(tmp_path, "good.mp4")
    assert pack(tmp_path) == 0
    assert pack(tmp_path, *WAVE, out="heard") == 0
    (plain,) = samples_of(tmp_path / "out").values()
    (heard,) = samples_of(tmp_path / "heard").values()
    assert plain.keys() == {"about", "json", "safetensors"}
    assert plain["safetensors"] == heard["safetensors"]
    about = dict(heard["about"])
    del about["sound"], about["crc32"][PART]
    assert plain["json"] == json.dumps(about).encode()
    assert not {"audio_processor", "sound_latent"} & read_card(tmp_path / "out").keys()
    assert '"sound"' not in (tmp_path / "out/plan.jsonl").read_text()
    capsys.readouterr()
    assert pack(tmp_path, "--silent", "drop", "--wave_rate", 8000, out="unused") == 0
    said = capsys.readouterr().out
    assert "--silent is not used: there is no --audio_processor" in said
    assert "--wave_rate is not used: it means nothing to 'pixel'" in said


@pytest.mark.slow
def test_a_window_gets_its_own_span(tmp_path: Path) -> None:
    """The chirp begins at 0.3 s: in the second window of a fifth of a second after 0.1 s."""
    clip(tmp_path, "good.mp4")
    windows = ("--target_frames", 5, "--window", "all")
    assert pack(tmp_path, *WAVE, *windows) == 0
    found = [Entry.from_line(line).sound for line in (tmp_path / "out/plan.jsonl").open()]
    begins = [one.begin for one in found if one is not None]
    assert begins == pytest.approx([0.0, 0.2, 0.4, 0.6])
    heard = {}
    for shard in (tmp_path / "out").glob("train/*.tar"):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(PART):
                    latent = safetensors.torch.load(tar.extractfile(member).read())["latent"]  # type: ignore[union-attr]
                    heard[member.name.partition(".")[0][-2:]] = latent
    loud = {key: (latent.abs() > 0.05).any(0) for key, latent in heard.items()}
    (second,) = (key for key in loud if key.endswith("-1"))
    assert loud[second].nonzero()[0] == 5  # frames of 20 ms: the chirp begins in the sixth
    assert pack(tmp_path, *WAVE, "--mode", "frames", "--num_frames", 2, out="frames") == 0
    assert not with_sound(tmp_path / "frames")


@pytest.mark.slow
def test_another_dataset_gives_the_scale(tmp_path: Path) -> None:
    clip(tmp_path, "good.mp4")
    assert pack(tmp_path, *WAVE) == 0
    for path in (tmp_path / "clips").iterdir():
        path.unlink()
    clip(tmp_path, "quieter.mp4", Sound(end=0.8, level=0.1))
    assert pack(tmp_path, *WAVE, "--whitening_from", tmp_path / "out", out="other") == 0
    assert pack(tmp_path, *WAVE, out="own") == 0
    scales = {
        name: read_card(tmp_path / name)["sound_latent"]["scale"]
        for name in ("out", "other", "own")
    }
    assert scales["other"] == scales["out"] > scales["own"]


def test_a_damaged_sound_part_is_found(tmp_path: Path, capsys) -> None:
    clip(tmp_path, "good.mp4")
    assert pack(tmp_path, *WAVE) == 0
    card = read_card(tmp_path / "out")
    del card["sound_latent"]
    (tmp_path / "out/dataset_card.json").write_text(json.dumps(card))
    assert main(["inspect", str(tmp_path / "out")]) == 1
    assert "no object 'sound_latent'" in capsys.readouterr().err
    shard = next((tmp_path / "out").glob("train/*.tar"))
    content = bytearray(shard.read_bytes())
    content[content.rindex(PART.encode()) + 1500] ^= 1  # behind the header of the last file
    shard.write_bytes(content)
    assert main(["inspect", str(tmp_path / "out")]) == 1
    assert f"checksum of .{PART} is" in capsys.readouterr().err


def test_sound_in_the_place_of_a_video_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "clips").mkdir()
    with av.open(str(tmp_path / "clips" / "song.mp4"), "w") as container:
        track = container.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), "f4"), format="flt", layout="mono")
        frame.sample_rate = RATE
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    assert pack(tmp_path, *WAVE) == 1
    assert "song.mp4 (it holds sound without pictures;" in capsys.readouterr().err


def test_wave_codec_refuses_what_it_cannot_do() -> None:
    with pytest.raises(CodecError, match="--wave_channels 6"):
        Wave(wave_rate=RATE, wave_channels=6, frame=80)
    with pytest.raises(CodecError, match="--wave_rate 10"):
        Wave(wave_rate=10, wave_channels=1, frame=8)
    with pytest.raises(CodecError, match="--wave_frame 0"):
        Wave(wave_rate=RATE, wave_channels=1, frame=0)
    codec = Wave(wave_rate=RATE, wave_channels=1, frame=80)
    with pytest.raises(ValueError, match="encodes waveforms"):
        codec.encode(torch.zeros(2, 80))
    with pytest.raises(ValueError, match=r"decodes latents \[80, A\]"):
        codec.decode(torch.zeros(81, 2))
