"""Generation of a video with its sound: in packs as alone, and what is given comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.batch import SOUND
from dit.config import ObjectiveConfig, Sampler
from dit.distributed.model_parallel import FullForward
from dit.models.sound_dit.model import SoundDit
from dit.sampling.conditions.sound import SoundRequest, sound_frames
from dit.sampling.generate import Request, SamplingSettings, generate_streams
from dit.train.model_and_optimizer import randomise
from tests.packs import run_config
from tests.sounding import GRIDS, SOUNDS, sound_model, sound_samples

MODEL = sound_model()
CONFIG = run_config(model=MODEL, objective=ObjectiveConfig(name="flow"))
SETTINGS = SamplingSettings(num_steps=3, guidance=2.0)


@pytest.fixture
def network(groups):
    network = SoundDit(MODEL, groups)
    randomise(network, seed=7)
    return FullForward([network.eval()])


def request_of(number: int, **given) -> Request:
    sample = sound_samples(MODEL)[number]
    width = MODEL.crossattn_emb_size
    text_LE = sample.text_LE if len(sample.text_LE) else torch.ones(1, width)
    return Request(
        inputs={"text": text_LE},
        negative={"text": torch.zeros(1, width)},
        latent_FHW=tuple(sample.latent_CFHW.shape[1:]),
        fps=sample.fps,
        seed=number,
        sound=SoundRequest(frames=SOUNDS[number], **given),
    )


def requests() -> list[Request]:
    """Requests of six samples: one has its sound given, one all frames, one a start of either."""
    samples = sound_samples(MODEL)
    sounds = [sample.others.get(SOUND) for sample in samples]
    given = {
        2: {"given_CFHW": samples[2].latent_CFHW},
        3: {"given_KA": sounds[3]},
        4: {"given_KA": sounds[4][:, :5], "given_CFHW": samples[4].latent_CFHW[:, :1]},
    }
    return [request_of(n, **given.get(n, {})) for n in range(len(GRIDS))]


@pytest.mark.parametrize("sampler", [Sampler.EULER, Sampler.HEUN, Sampler.UNIPC])
def test_samples_are_as_alone_and_keep_what_is_given(network, sampler) -> None:
    settings, asked = replace(SETTINGS, sampler=sampler), requests()
    told = {"config": CONFIG, "settings": settings}
    packed = generate_streams(network, asked, **told)
    for n, (one, made) in enumerate(zip(asked, packed, strict=True)):
        (alone,) = generate_streams(network, [one], **told)
        torch.testing.assert_close(made.latent_CFHW, alone.latent_CFHW, rtol=1e-5, atol=2e-5)
        assert (made.sound_KA is None) == (SOUNDS[n] == 0)
        if made.sound_KA is not None:
            assert made.sound_KA.shape == (MODEL.sound_channels, SOUNDS[n])
            torch.testing.assert_close(made.sound_KA, alone.sound_KA, rtol=1e-5, atol=2e-5)
            assert made.sound_KA.isfinite().all()
    for one, made in zip(asked, packed, strict=True):
        for given, whole in (
            (one.sound.given_KA, made.sound_KA),
            (one.sound.given_CFHW, made.latent_CFHW),
        ):
            if given is not None:
                assert torch.equal(whole[:, : given.shape[1]], given)


def test_the_sound_is_that_of_its_own_seed_and_frames(network) -> None:
    told = {"config": CONFIG, "settings": SETTINGS}
    first = request_of(0)
    changed = [
        replace(first, seed=9),
        request_of(0, given_CFHW=torch.ones(MODEL.in_channels, *first.latent_FHW)),
        replace(first, sound=SoundRequest(frames=0)),
    ]
    (own, again, *others) = generate_streams(network, [first, first, *changed], **told)
    torch.testing.assert_close(own.sound_KA, again.sound_KA, rtol=1e-5, atol=2e-5)
    assert others[2].sound_KA is None
    assert all((own.sound_KA - one.sound_KA).abs().max() > 1e-3 for one in others[:2])
    assert (own.latent_CFHW - others[2].latent_CFHW).abs().max() > 1e-3


def test_what_takes_one_stream_is_refused(network) -> None:
    with pytest.raises(ValueError, match="sampler lcm"):
        settings = replace(SETTINGS, sampler=Sampler.LCM)
        generate_streams(network, requests(), config=CONFIG, settings=settings)


def test_the_length_of_a_sound_is_that_of_its_frames() -> None:
    model = sound_model(sound_rate=100.0)
    assert sound_frames(model, frames=9, fps=8.0) == 113  # 1.125 s
    assert sound_frames(model, frames=8, fps=8.0) == 100
    assert sound_frames(model, frames=1, fps=float("nan")) == 0
