"""What a run draws for the sound of samples: levels, noise, and what is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.batch import LATENTS, SOUND
from dit.config import ObjectiveConfig
from dit.config.choices import SoundLevels
from dit.data.pack import pack_samples
from dit.objectives.pack_draws import Draw, DrawContext, dropped_captions, is_given
from dit.objectives.registry import training_objective
from dit.objectives.training_target import drawn_pack, training_problem, validation_problem
from tests.sounding import sound_layout, sound_model, sound_samples

MODEL = sound_model()
PACK = pack_samples(sound_samples(MODEL), sound_layout(MODEL))
FLOW = ObjectiveConfig(name="flow")
WITH_SOUND = [0, 2, 3, 4]


def problem_of(options: ObjectiveConfig, *, step: int = 3, pack=PACK):
    told = {"seed": 1, "step": step, "null": {}, "options": options}
    return training_problem(training_objective(options), pack, **told)


def test_the_main_stream_draws_what_it_draws_alone() -> None:
    _, both = problem_of(FLOW)
    _, alone = problem_of(FLOW, pack=replace(PACK, others={}))
    for name in ("input_TC", "level_M", "target_TC"):
        mine = getattr(both, name)[: len(getattr(alone, name))]
        assert torch.equal(mine, getattr(alone, name)), name


def test_a_sound_has_a_level_of_its_own_or_that_of_its_frames() -> None:
    _, own = problem_of(FLOW)
    _, same = problem_of(replace(FLOW, sound_levels=SoundLevels.SAME))
    assert torch.equal(same.others[SOUND].noise_N, same.noise_N)
    assert not (own.others[SOUND].noise_N == own.noise_N).any()
    assert torch.equal(own.noise_N, same.noise_N)
    # Of the same quantile, through a shift by the sound's own number of tokens.
    shifted = replace(FLOW, sound_levels=SoundLevels.SAME, time_shift_type="linear")
    _, by_tokens = problem_of(shifted)
    sound = PACK.others[SOUND]
    assert by_tokens.others[SOUND].noise_N.isfinite().all()
    fewer = [s < t for s, t in zip(sound.latent_tokens, PACK.latent_tokens, strict=True)]
    assert (by_tokens.others[SOUND].noise_N < by_tokens.noise_N).tolist() == fewer


def test_noise_of_sound_is_drawn_for_its_real_tokens() -> None:
    batch, whole = problem_of(FLOW)
    context = DrawContext(seed=1, step=3, pack_id=PACK.pack_id, null={}, options=FLOW, route=None)
    sound, problem = batch.others[SOUND], whole.others[SOUND]
    drawn_RC = torch.randn(
        sound.real_tokens, MODEL.sound_channels, generator=context.rng(Draw.SOUND_NOISE)
    )
    noise_TC = problem.target_TC + sound.latent_TC
    torch.testing.assert_close(noise_TC[sound.is_real_T], drawn_RC)
    assert not problem.input_TC[~sound.is_real_T].any()


def test_what_is_given_is_drawn_at_its_rates() -> None:
    options = replace(FLOW, video_given=0.25, sound_given=0.25, sound_prefix=0.5)
    found = {"frames": 0, "sound": 0, "prefix": 0, "neither": 0}
    for step in range(200):
        pack, _ = drawn_pack(PACK, seed=5, step=step, null={}, options=options)
        sound = pack.others[SOUND]
        for n in range(PACK.num_samples):
            frames, heard = pack.clean_tokens[n], sound.clean_tokens[n]
            if n not in WITH_SOUND:
                assert not frames and not heard
                continue
            assert not (frames and heard)
            whole = heard == sound.latent_tokens[n]
            kind = "frames" if frames else "sound" if whole else "prefix" if heard else "neither"
            assert frames in (0, PACK.latent_tokens[n])
            found[kind] += 1
        given_T = ~pack.is_target_T & pack.is_real_T
        assert int(given_T.sum()) == sum(pack.clean_tokens)
        assert torch.equal(given_T, pack.level_row_T >= pack.num_samples)
    shares = {name: count / 800 for name, count in found.items()}
    assert 0.2 < shares["frames"] < 0.3 and 0.2 < shares["sound"] < 0.3
    assert 0.15 < shares["prefix"] < 0.25  # half of the rest, less those of no token


def test_captions_of_samples_with_a_given_stream_are_dropped_at_a_rate_of_their_own() -> None:
    options = replace(FLOW, video_given=0.5, given_text_dropout=1.0, text_dropout=0.0)
    plain = replace(options, given_text_dropout=None, text_dropout=0.4)
    for step in range(20):
        pack, _ = drawn_pack(
            PACK,
            seed=5,
            step=step,
            null={},
            options=replace(options, text_dropout=0.0, given_text_dropout=None),
        )
        told = {"seed": 5, "step": step}
        assert dropped_captions(pack, **told, options=options) == is_given(pack)
        alone = replace(pack, others={})
        mine = dropped_captions(pack, **told, options=plain)
        assert mine == dropped_captions(alone, **told, options=plain)


@pytest.mark.parametrize("quantile", [0.1, 0.9])
def test_validation_has_both_streams_at_one_quantile(quantile) -> None:
    objective = training_objective(FLOW)
    first, again = (
        validation_problem(objective, PACK, seed=3, quantile=quantile) for _ in range(2)
    )
    wanted = objective.levels(torch.full((6,), quantile), PACK.latent_tokens)
    for name, one in ((LATENTS, first), (SOUND, first.others[SOUND])):
        torch.testing.assert_close(one.noise_N, wanted, msg=name)
    assert torch.equal(first.others[SOUND].input_TC, again.others[SOUND].input_TC)
    assert not torch.equal(
        first.others[SOUND].target_TC, problem_of(FLOW)[1].others[SOUND].target_TC
    )
