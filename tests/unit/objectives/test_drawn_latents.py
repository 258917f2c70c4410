"""Latents that are drawn of the distributions which a shard holds, at each visit of a sample."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dit.batch import LatentSample, LatentVariance, PackedBatch
from dit.config import ObjectiveConfig
from dit.config.choices import ValidationLatents
from dit.data.pack import pack_samples
from dit.models.family import InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import GridPositions
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem, validation_pack
from dit.pack_wire import flatten_pack, unflatten_pack

C = 2
NULL = {"text": torch.zeros(1, 5)}
FLOW = ObjectiveConfig(name="flow", text_dropout=0.0)
INPUTS = (
    SampleInput(name="text", kind=InputKind.TEXT, width=5),
    SampleInput(name="first_frame_latent", kind=InputKind.FRAMES, width=C, required=False),
    SampleInput(name="reference", kind=InputKind.REFERENCE, width=C, required=False),
)
LAYOUT = PatchLayout(
    patch_temporal=1,
    patch_spatial=2,
    sample_multiple=4,
    positions=GridPositions(),
    inputs=INPUTS,
    clean_level=0.0,
)


def sample_of(
    number: int, *, logvar: float | None = -1.0, size=(1, 4, 6), dtype=torch.bfloat16, **others
) -> LatentSample:
    latent_CFHW = torch.full((C, *size), float(number)).to(dtype)
    return LatentSample(
        key=f"k{number}",
        latent_CFHW=latent_CFHW,
        text_LE=torch.ones(1 + number % 2, 5),
        fps=math.nan,
        latent_logvar_CFHW=None if logvar is None else torch.full_like(latent_CFHW, logvar),
        others=others,
    )


def trained(pack: PackedBatch, *, seed: int = 1, step: int = 2, **options) -> PackedBatch:
    options = replace(FLOW, **options)
    objective = training_objective(options)
    return training_problem(objective, pack, seed=seed, step=step, null=NULL, options=options)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_have_the_mean_and_variance_of_the_shard(dtype) -> None:
    """Over many visits; each bound is six deviations of the estimate, in the closed form."""
    given = [(0, -2.0), (3, 1.0), (5, None)]
    samples = [sample_of(n, logvar=logvar, dtype=dtype) for n, logvar in given]
    pack = pack_samples(samples, LAYOUT)
    visits = torch.stack([trained(pack, step=step).latent_TC for step in range(150)])
    assert visits.dtype == torch.float32
    for (mean, logvar), start in zip(given, pack.starts, strict=False):
        drawn = visits[:, start : start + 6]  # real tokens
        if logvar is None:
            assert torch.equal(drawn, torch.full_like(drawn, mean))  # its latent is no mean
            continue
        variance, count = math.exp(logvar), drawn.numel()
        assert abs(drawn.mean().item() - mean) < 6 * math.sqrt(variance / count)
        found = drawn.var().item()
        assert abs(found - variance) < 6 * variance * math.sqrt(2 / count)
    padding = visits[:, ~pack.is_real_T]
    assert padding.numel() and not padding.any()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_variances_are_those_of_the_shard_beside_texts_of_any_length(count: int) -> None:
    """Patches are written two numbers at once, wherever a pack has room for them."""
    samples = [sample_of(n, logvar=-float(n), dtype=torch.float32) for n in range(count)]
    pack = pack_samples(samples, LAYOUT)
    logvar_TC = pack.method(LatentVariance).logvar_TC
    for n, start in enumerate(pack.starts[:-1]):
        assert (logvar_TC[start : start + 6] == -n).all()


def test_a_draw_follows_from_seed_step_and_pack() -> None:
    samples = [sample_of(n) for n in range(3)]
    pack = pack_samples(samples, LAYOUT)
    first = trained(pack).latent_TC
    sent = unflatten_pack(*flatten_pack(pack))  # as it comes to other ranks
    assert torch.equal(trained(sent).latent_TC, first)
    assert pack.method(LatentVariance) and trained(pack).method(LatentVariance) is None
    others = [
        trained(pack, seed=2),
        trained(pack, step=3),
        trained(pack_samples([*samples[1:], samples[0]], LAYOUT)),
    ]
    for other in others:
        assert not torch.isin(other.latent_TC[other.is_real_T], first[pack.is_real_T]).any()


def test_noise_and_levels_are_those_of_latents_that_are_not_drawn() -> None:
    drawn, plain = (
        pack_samples([sample_of(n, logvar=logvar) for n in range(3)], LAYOUT)
        for logvar in (-1.0, None)
    )
    objective = training_objective(FLOW)
    told = {"seed": 1, "step": 2, "null": NULL, "options": FLOW}
    (one, problem), (other, wanted) = (
        training_problem(objective, pack, **told) for pack in (drawn, plain)
    )
    assert torch.equal(problem.level_M, wanted.level_M)
    noise, plain_noise = problem.target_TC + one.latent_TC, wanted.target_TC + other.latent_TC
    torch.testing.assert_close(noise, plain_noise)
    drawn_by = (one.latent_TC - other.latent_TC) / math.exp(-0.5)
    apart = ~torch.isclose(drawn_by, plain_noise, atol=1e-3)[one.is_real_T]
    assert apart.float().mean() > 0.9  # a stream of its own


def test_given_frames_and_references_are_as_stored() -> None:
    given, reference = torch.full((C, 1, 4, 6), 8.0), torch.full((C, 1, 2, 4), 9.0)
    samples = [
        sample_of(0, size=(3, 4, 6), first_frame_latent=given, reference=reference),
        sample_of(1, size=(3, 4, 6)),
    ]
    pack = pack_samples(samples, LAYOUT)
    latent_TC = trained(pack).latent_TC
    assert (latent_TC[:6] == 8).all() and (latent_TC[18:20] == 9).all()
    assert len(latent_TC[6:18].unique()) == 12 * 4 * C


def test_both_parts_of_a_sample_with_two_levels_have_one_draw() -> None:
    pack = pack_samples([sample_of(n, size=(1, 8, 8)) for n in range(2)], LAYOUT)
    whole = trained(pack).latent_TC
    parted = trained(pack, second_level_rate=0.25)
    assert parted.num_samples == 4
    of_parts = parted.latent_TC[parted.is_real_T]
    assert torch.equal(of_parts.sort(0).values, whole[pack.is_real_T].sort(0).values)


def test_validation_takes_the_mean_or_one_draw_of_each_sample() -> None:
    samples = [sample_of(n) for n in range(4)]
    pack, later = pack_samples(samples[:3], LAYOUT), pack_samples(samples[2:], LAYOUT)

    def latents(pack: PackedBatch, latents=ValidationLatents.DRAWN, seed=1):
        found = validation_pack(pack, seed=seed, options=FLOW, latents=latents)
        assert found.method(LatentVariance) is None
        return found.latent_TC

    assert torch.equal(latents(pack, ValidationLatents.MEAN), pack.latent_TC)
    drawn = latents(pack)
    assert torch.equal(latents(pack), drawn)
    # The sample in another pack, at another place, with the same draw
    start, stop = pack.starts[2:4]
    assert torch.equal(latents(later)[: stop - start], drawn[start:stop])
    real = pack.is_real_T
    for other in (latents(pack, seed=2), trained(pack, step=0).latent_TC):
        assert not torch.isin(other[real], drawn[real]).any()
    residual = (drawn - pack.latent_TC)[real] / math.exp(-0.5)
    assert len(residual.unique()) == residual.numel()
