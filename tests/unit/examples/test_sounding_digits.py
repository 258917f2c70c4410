"""Moving digits with a tone: what is packed, and what is read from clips with known answers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.sources import digits as packed
from dit.batch import LATENTS, SOUND
from dit.config import Precision
from dit.models.ltx2.family import TINY, Ltx2Config
from dit.models.ltx2.model import Ltx2Network
from dit.train.model_and_optimizer import randomise
from examples.digits.judges import DIRECTIONS, MOTIONS, ClipJudge, Motion
from examples.digits.sounding_digits import (
    BARS,
    conclude,
    main,
    part_streams,
    partners,
    parts_right,
    sounding_clips,
    spread_of_real,
)
from examples.digits.tones import (
    FPS,
    FRAMES,
    PITCHES,
    RATE,
    SAMPLES,
    digit_of,
    is_rising,
    pitch_of,
    rises,
    tone,
)
from tests.families import ltx2


def test_tones_are_read_as_they_were_made() -> None:
    assert (FPS, FRAMES) == (packed.FPS, packed.FRAMES)
    for motion in MOTIONS:
        wave_S = tone(motion.digit, DIRECTIONS[motion.direction])
        assert wave_S.shape == (SAMPLES,) and np.abs(wave_S).max() < 1
        assert pitch_of(wave_S) == PITCHES[motion.digit]
        assert digit_of(wave_S) == motion.digit
        assert rises(wave_S) == is_rising(motion) == (DIRECTIONS[motion.direction] in "right down")


def test_noise_and_the_phase_do_not_change_what_is_heard() -> None:
    rng, times = np.random.default_rng(0), np.arange(SAMPLES) / RATE
    for digit, pitch in enumerate(PITCHES):
        phase = rng.uniform(0, 2 * np.pi)
        wave_S = np.sin(2 * np.pi * pitch * times + phase) * np.linspace(1, 0.2, SAMPLES)
        noisy_S = wave_S + 0.5 * rng.standard_normal(SAMPLES)
        assert digit_of(noisy_S) == digit and not rises(noisy_S) and rises(noisy_S[::-1])


@pytest.mark.parametrize("pitch", [120.0, 280.0, 1080.0, 1900.0])
def test_a_tone_between_two_pitches_is_none(pitch: float) -> None:
    assert digit_of(np.sin(2 * np.pi * pitch * np.arange(SAMPLES) / RATE)) is None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounding") / "data"
    assert main(["pack", str(folder), "--digits", "60"]) == 0
    return folder


def test_three_in_four_clips_have_the_tone_of_their_digit(data: Path) -> None:
    train, held_out = (list(sounding_clips(data, split)) for split in ("train", "val"))
    clips = [*train, *held_out]
    assert len(clips) == 240 and len(held_out) % 4 == 0 and held_out
    heard = [one for one in clips if one.wave_S is not None]
    assert len(heard) == 180
    for motion, frames_FHW3, wave_S in heard:
        assert frames_FHW3.shape == (9, 16, 16, 3)
        # To the bit, through the codec and the shard.
        assert wave_S is not None and np.array_equal(
            wave_S, tone(motion.digit, DIRECTIONS[motion.direction])
        )
    missing = [one.motion.direction for one in clips if one.wave_S is None]
    assert {missing.count(direction) for direction in range(4)} == {15}


def test_parts_are_those_of_what_was_asked(data: Path) -> None:
    clips = [one for one in sounding_clips(data, "train") if one.wave_S is not None]
    motions, frames, waves = zip(*clips, strict=True)
    judge = ClipJudge.trained_on(motions, frames)
    read = parts_right(judge, motions, clips=frames, waves=waves)
    assert min(read["digit"], read["direction"]) > 0.95 and read["pitch"] == read["loudness"] == 1
    others = [motions[number] for number in partners(motions, seed=0)]
    wrong = parts_right(judge, others, clips=frames, waves=waves)
    assert max(wrong["digit"], wrong["pitch"]) < 0.05 and wrong["loudness"] == 0
    assert parts_right(judge, motions, waves=waves) == {"pitch": 1, "loudness": 1}
    turned = [Motion(one.digit, one.direction ^ 1) for one in motions]
    half = parts_right(judge, turned, clips=frames, waves=waves)
    assert half["digit"] > 0.95 and half["direction"] < 0.05
    assert half["pitch"] == 1 and half["loudness"] == 0


def test_the_spread_is_that_beside_real_clips_of_the_same_caption(data: Path) -> None:
    clips = list(sounding_clips(data, "train"))
    motions, frames, _ = zip(*clips, strict=True)
    assert spread_of_real(clips, motions, frames)["spread"] == pytest.approx(1)
    assert not spread_of_real(clips, motions[:1], frames[:1])
    # The mean of a caption's clips, moved half as far from it: a quarter of the variance.
    mean = {
        one: np.mean([f for m, f in zip(motions, frames, strict=True) if m == one], 0)
        for one in motions
    }
    nearer = [(f + mean[m]) / 2 for m, f in zip(motions, frames, strict=True)]
    found = spread_of_real(clips, motions, nearer)["spread"]
    assert found == pytest.approx(0.25, rel=0.02)
    same = [frames[motions.index(one)] for one in motions]
    assert spread_of_real(clips, motions, same)["spread"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("size", TINY)
def test_streams_of_ltx2_do_not_read_each_other_once_they_are_parted(groups, size: str) -> None:
    model = Ltx2Config(**{"name": "custom", **TINY[size], "precision": Precision.FP32})
    network = Ltx2Network(model, groups)
    randomise(network, seed=7)
    batch = ltx2.pack_with_sound(model)
    sound = batch.others[SOUND]
    louder = replace(batch, others={SOUND: replace(sound, latent_TC=sound.latent_TC + 1)})
    brighter = replace(batch, latent_TC=batch.latent_TC + 1)

    def reads() -> dict[str, bool]:
        """Stream -> whether its output is another when the other stream is."""
        with torch.no_grad():
            made, heard, seen = (network(*ltx2.fed(one)) for one in (batch, louder, brighter))
        changed = {LATENTS: heard, SOUND: seen}
        return {name: not torch.equal(made[name], changed[name][name]) for name in changed}

    assert reads() == {LATENTS: True, SOUND: True}
    opened: Any = SimpleNamespace(model=network)
    part_streams(opened)
    assert reads() == {LATENTS: False, SOUND: False}


def test_partners_have_another_digit_and_the_other_loudness() -> None:
    motions = [*MOTIONS] * 3
    drawn = partners(motions, seed=1)
    assert drawn != partners(motions, seed=2) and len(set(drawn)) > len(drawn) // 4
    for own, number in zip(motions, drawn, strict=True):
        other = motions[number]
        assert other.digit != own.digit and is_rising(other) != is_rising(own)


@pytest.mark.parametrize("wrong", [None, *((part, name) for part in BARS for name in BARS[part])])
def test_what_is_out_of_its_range_is_an_error(wrong, tmp_path: Path, capsys) -> None:
    middle = {
        part: {name: sum(bounds) / 2 for name, bounds in bars.items()}
        for part, bars in BARS.items()
    }
    if wrong is not None:
        part, name = wrong
        least, most = BARS[part][name]
        middle[part][name] = most + 0.01 if least == 0 else least - 0.01
    args = argparse.Namespace(checkpoint_path=str(tmp_path), output_dir=None, seed=0)
    assert conclude(middle, args) == (wrong is not None)
    assert (tmp_path / "evaluation.json").is_file()
    said = " ".join(capsys.readouterr().out.split())
    assert ("is not in" in said) == (wrong is not None)
    if wrong is not None:
        assert f"{wrong[0]}: {wrong[1]}" in said
