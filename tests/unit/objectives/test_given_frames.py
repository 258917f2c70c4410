"""Which frames of a sample are given: drawn for each sample, and equal to packs that say the same.

The samples have given frames that are their own first ones, as a causal VAE makes them, beside
references, condition channels and rows that are made of a picture.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dit.batch import CleanTokens, LatentSample, PackedBatch
from dit.config import ObjectiveConfig, Problems
from dit.config_loading import ConfigError, load_config
from dit.data.pack import pack_samples
from dit.models.family import InputKind, NullInput, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import GridPositions
from dit.models.registry import VARIABLE
from dit.objectives.pack_draws import with_clean_tokens
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem, validation_pack, validation_problem
from dit.train.loss import loss_of
from recipes.runs import dit_debug
from tests.toy_family import PLACE

C = 2
INPUTS = (
    SampleInput(name="text", kind=InputKind.TEXT, width=5),
    SampleInput(name="image_embed", kind=InputKind.TEXT, width=3, null=NullInput.KEPT),
    SampleInput(name="image_vector", kind=InputKind.VECTOR, width=3, null=NullInput.KEPT),
    SampleInput(name="condition", kind=InputKind.CHANNELS, width=3),
    SampleInput(name="first_frame_latent", kind=InputKind.FRAMES, width=C, required=False),
    SampleInput(name="reference", kind=InputKind.REFERENCE, width=C, required=False),
)
LAYOUT = PatchLayout(
    patch_temporal=1,
    patch_spatial=2,
    sample_multiple=4,
    positions=GridPositions(),
    inputs=INPUTS,
    clean_level=1e-4,
    draws_given_frames=True,
)
NULL = {"text": torch.full((1, 5), 9.0)}
SIZES = [(4, 2, 6), (1, 4, 4), (3, 4, 2), (2, 2, 2)]


def flow(**options) -> ObjectiveConfig:
    return ObjectiveConfig(name="flow", **({"text_dropout": 0.0} | options))


FLOW = training_objective(flow())


def sample_of(number: int, given: int | None) -> LatentSample:
    """One with so many given frames; None: with one where there are several."""
    rng = torch.Generator().manual_seed(number)
    size = SIZES[number % len(SIZES)]
    latent_CFHW = torch.randn(C, *size, generator=rng)
    others = {
        "image_embed": torch.randn(2, 3, generator=rng),
        "image_vector": torch.randn(3, generator=rng),
        "condition": torch.randn(3, *size, generator=rng),
    }
    if number % 3 == 0:
        others["reference"] = torch.randn(C, 1, 2, 4, generator=rng)
    if given is None:
        given = int(size[0] > 1)
    if given:
        others["first_frame_latent"] = latent_CFHW[:, :given].clone()
    text_LE = torch.randn(1 + number % 3, 5, generator=rng)
    return LatentSample(
        key=str(number), latent_CFHW=latent_CFHW, text_LE=text_LE, fps=math.nan, others=others
    )


def packed(given: list[int | None], layout: PatchLayout = LAYOUT) -> PackedBatch:
    return pack_samples([sample_of(number, count) for number, count in enumerate(given)], layout)


def trained(pack: PackedBatch, *, step: int = 2, **options):
    options = flow(**options)
    return training_problem(FLOW, pack, seed=1, step=step, null=NULL, options=options)


def frames_given(pack: PackedBatch) -> list[int]:
    clean = pack.clean_tokens
    return [tokens // math.prod(grid[1:]) for tokens, grid in zip(clean, pack.grids, strict=True)]


def assert_same(one: PackedBatch, other: PackedBatch) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.nan_to_num(), other.tensors[name].nan_to_num()), name
    assert one.clean_tokens == other.clean_tokens and one.loss_tokens == other.loss_tokens
    assert one.has_given_tokens == other.has_given_tokens


@pytest.mark.parametrize("counts", [(3, 0, 1, 1), (0, 0, 0, 0), (2, 0, 0, 1), (1, 0, 2, 0)])
def test_a_pack_with_drawn_frames_is_one_that_was_packed_with_them(counts) -> None:
    tokens = [n * h * w // 4 for n, (_, h, w) in zip(counts, SIZES, strict=True)]
    wanted = packed(list(counts))
    for start in (packed([0] * 4), packed([None] * 4)):
        assert_same(with_clean_tokens(start, tokens), wanted)


def test_every_sample_keeps_its_first_frame_by_default() -> None:
    pack = packed([None] * 16)
    batch, problem = trained(pack)
    assert_same(batch, pack)
    again, same = trained(pack, image_condition_probability=1.0)
    assert_same(again, pack)
    assert torch.equal(problem.input_TC, same.input_TC)


def test_a_sample_that_loses_its_first_frame_trains_as_one_without() -> None:
    """Levels, noise and captions are those of the run without the draw."""
    pack = packed([None] * 64)
    batch, problem = trained(pack, image_condition_probability=0.5, text_dropout=0.5)
    counts = frames_given(batch)
    several = [number for number, grid in enumerate(pack.grids) if grid[0] > 1]
    assert {counts[number] for number in several} == {0, 1}
    assert not any(counts[number] for number in range(64) if number not in several)
    alike, wanted = trained(packed([*counts]), text_dropout=0.5)
    assert_same(batch, alike)
    for name in ("input_TC", "level_M", "target_TC", "noise_N"):
        assert torch.equal(getattr(problem, name), getattr(wanted, name)), name
    kept, before = trained(pack, text_dropout=0.5)
    assert torch.equal(problem.noise_N, before.noise_N)
    assert batch.text_offsets == kept.text_offsets
    both = batch.is_target_T & kept.is_target_T
    assert torch.equal(problem.input_TC[both], before.input_TC[both])
    # Text-to-video: noise, loss and the sample's own level on every token of the target.
    lost = next(number for number in several if counts[number] == 0)
    start, own = batch.starts[lost], batch.latent_tokens[lost]
    assert batch.is_target_T[start : start + own].all()
    assert (batch.level_row_T[start : start + own] == lost).all()
    assert problem.target_TC[start : start + own].abs().min() > 0
    loss = loss_of(batch, problem, torch.zeros_like(problem.target_TC), flow())
    assert int(loss.count_N[lost]) == own


def test_a_first_frame_is_kept_at_its_rate_and_not_by_the_level() -> None:
    pack = packed([None if number % 4 != 1 else 0 for number in range(800)])
    found, levels = [], []
    for step in range(5):
        batch, problem = trained(pack, step=step, image_condition_probability=0.3)
        found += frames_given(batch)
        levels += problem.noise_N.tolist()
    several = [number for number in range(4000) if number % 4 != 1]
    rate = sum(found[number] for number in several) / len(several)
    assert abs(rate - 0.3) < 5 * (0.21 / len(several)) ** 0.5
    kept = torch.tensor([levels[number] for number in several if found[number]])
    lost = torch.tensor([levels[number] for number in several if not found[number]])
    assert abs(kept.mean() - lost.mean()) < 5 * 0.21 * (1 / len(kept) + 1 / len(lost)) ** 0.5
    first, second = found[:800], found[800:1600]
    assert first != second


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (1, 2, 1, 4), (0, 1), (1, 0)], ids=str)
def test_numbers_of_given_frames_have_their_frequencies(weights) -> None:
    """A target keeps a frame to learn, so that an image is never given."""
    pack = packed([0] * 800)
    found: list[int] = []
    for step in range(3):
        batch, problem = trained(pack, step=step, given_frames=weights)
        found += frames_given(batch)
        assert batch.method(CleanTokens).level == 1e-4 and batch.num_levels == 1600
        torch.testing.assert_close(problem.level_M[800:], torch.full((800,), 0.1))
        given = batch.is_real_T & ~batch.is_target_T
        assert torch.equal(problem.input_TC[given], batch.latent_TC[given])
        assert not problem.target_TC[given].any()
    by_length = {4: 0, 3: 2, 1: 1, 2: 3}
    for frames, first in by_length.items():
        mine = found[first::4]
        total, most = sum(weights), frames - 1
        for number in range(frames):
            share = sum(weights[number:] if number == most else weights[number : number + 1])
            rate, count = share / total, mine.count(number)
            assert abs(count - rate * len(mine)) <= 5 * (rate * (1 - rate) * len(mine)) ** 0.5
        assert {*mine} <= {*range(frames)}


def test_validation_gives_the_same_frames_each_time_and_not_those_of_training() -> None:
    for options in ({"given_frames": (1, 1, 1)}, {"image_condition_probability": 0.5}):
        pack = packed([None] * 200)
        one, again = (validation_pack(pack, seed=1, options=flow(**options)) for _ in range(2))
        assert_same(one, again)
        assert len({*frames_given(one)}) >= 2
        other = validation_pack(pack, seed=2, options=flow(**options))
        training, _ = trained(pack, step=0, **options)
        assert frames_given(one) not in (frames_given(other), frames_given(training))
        problem = validation_problem(FLOW, one, seed=1, quantile=0.5)
        before = validation_problem(FLOW, pack, seed=1, quantile=0.5)
        both = one.is_target_T & pack.is_target_T
        assert torch.equal(problem.input_TC[both], before.input_TC[both])
    assert validation_pack(pack, seed=1, options=flow()) is pack


def test_a_dropped_caption_leaves_the_picture() -> None:
    pack = packed([None] * 8)
    batch, problem = trained(pack, text_dropout=1.0)
    assert batch.text_LE.eq(9).all() and batch.text_starts == tuple(range(9))
    for name in ("condition_TC", "texts.image_embed", "vectors.image_vector", "is_target_T"):
        assert torch.equal(batch.tensors[name], pack.tensors[name])
    assert batch.clean_tokens == pack.clean_tokens and any(batch.clean_tokens)
    given = batch.is_real_T & ~batch.is_target_T
    assert torch.equal(problem.input_TC[given], pack.latent_TC[given])


def test_a_dropped_picture_is_zeros_and_leaves_caption_and_noise() -> None:
    pack = packed([None] * 32)
    batch, problem = trained(pack, image_dropout=0.5)
    kept, before = trained(pack)
    assert pack.condition_TC is not None and batch.condition_TC is not None
    dropped = [not batch.vectors["image_vector"][number].any() for number in range(32)]
    assert 4 < sum(dropped) < 28
    for number, drop in enumerate(dropped):
        start, stop = pack.starts[number : number + 2]
        first, last = pack.text_offsets["image_embed"][number : number + 2]
        for now, was in (
            (batch.condition_TC[start:stop], pack.condition_TC[start:stop]),
            (batch.texts["image_embed"][first:last], pack.texts["image_embed"][first:last]),
            (batch.vectors["image_vector"][number], pack.vectors["image_vector"][number]),
        ):
            assert torch.equal(now, torch.zeros_like(was) if drop else was)
    assert_same(pack, packed([None] * 32))  # the pack that was read is as it was
    assert batch.text_offsets == kept.text_offsets
    assert torch.equal(batch.text_LE, kept.text_LE)
    assert torch.equal(problem.input_TC, before.input_TC)
    assert batch.clean_tokens == kept.clean_tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"given_frames": ()}, "at least one"),
        ({"given_frames": (0.0, 0.0)}, "not all 0"),
        ({"given_frames": (1.0, -1.0)}, "none negative"),
        ({"given_frames": (1.0, math.nan)}, "given_frames"),
        ({"given_frames": (1, 1), "image_condition_probability": 0.5}, "set one of them"),
        ({"image_condition_probability": 1.5}, r"must lie in \[0, 1\]"),
        ({"image_dropout": -0.1}, r"must lie in \[0, 1\]"),
    ],
    ids=str,
)
def test_numbers_that_are_no_frequencies_are_refused(options, said: str) -> None:
    with pytest.raises(Problems, match=said):
        flow(**options)


def test_networks_without_such_inputs_refuse_the_options(monkeypatch) -> None:
    wrong = {
        "objective.image_condition_probability=0.3": "takes no given frames",
        "objective.given_frames=[1, 1]": "takes no given frames",
        "objective.image_dropout=0.1": "takes no condition channels",
    }
    for override, why in wrong.items():
        with pytest.raises(ConfigError) as caught:
            load_config(dit_debug(), overrides=[override])
        (problem,) = caught.value.problems
        key = override.partition("=")[0]
        assert problem.startswith(key) and why in problem and "model.family=dit" in problem
        assert "from command line" in problem
    monkeypatch.setenv(VARIABLE, PLACE)
    toy = ["model.family=toy", "model.precision=fp32"]
    for override in ("objective.image_condition_probability=0.3", "objective.given_frames=[1, 1]"):
        config = load_config(dit_debug(), overrides=[*toy, override])
        draws = PatchLayout.of(config).draws_given_frames
        assert draws == (config.objective.given_frames is not None)


def test_packs_have_a_clean_level_where_frames_may_be_drawn() -> None:
    image = [sample_of(1, 0)]
    pack = pack_samples(image, LAYOUT)
    assert pack.method(CleanTokens).level == 1e-4 and not pack.has_given_tokens
    for problem in (trained(pack)[1], validation_problem(FLOW, pack, seed=1, quantile=0.5)):
        assert problem.level_M.shape == (pack.num_levels,) == (2,)
    alone = pack_samples(image, replace(LAYOUT, draws_given_frames=False))
    assert alone.method(CleanTokens) is None and alone.num_levels == 1
