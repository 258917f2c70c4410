"""Streams of tokens beside the main one: a sound, whose tokens some samples lack."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

from dit.batch import (
    LATENTS,
    WHOLE,
    CleanTokens,
    NoisyTokens,
    PackedBatch,
    SequenceShard,
    TokenStream,
    TokenWeights,
)
from dit.config import LossMean, ObjectiveConfig
from dit.distributed.model_parallel import split_tokens
from dit.objectives.registry import training_objective
from dit.objectives.training_target import problem_of_streams
from dit.pack_wire import flatten_pack, unflatten_pack
from dit.train.loss import loss_of
from dit.train.step import RankLoss

SOUND, WIDTH, MULTIPLE = "sound", 3, 4
LENGTHS = (6, 0, 3)
FLOW = ObjectiveConfig(name="flow")
LEVELS = {LATENTS: torch.tensor([0.1, 0.5, 0.9]), SOUND: torch.tensor([0.7, 0.3, 0.2])}


def sound_of(lengths=LENGTHS, **methods) -> TokenStream:
    sizes = [-(-n // MULTIPLE) * MULTIPLE for n in lengths]
    starts = tuple(sum(sizes[:n]) for n in range(len(sizes) + 1))
    is_real_T = torch.cat([torch.arange(size) < n for n, size in zip(lengths, sizes, strict=True)])
    segment_T = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    latent_TC = torch.randn(starts[-1], WIDTH, generator=torch.Generator().manual_seed(3))
    return TokenStream(
        latent_TC=latent_TC.masked_fill(~is_real_T[:, None], math.nan),
        position_TA=torch.arange(starts[-1]).float()[:, None],
        segment_T=segment_T,
        is_real_T=is_real_T,
        is_target_T=is_real_T,
        level_row_T=segment_T,
        grids=tuple((n, 1, 1) for n in lengths),
        starts=starts,
        share=WHOLE,
        methods=methods,
    )


@pytest.fixture
def pack(make_pack) -> PackedBatch:
    """Three samples, the second without sound; tokens of the sound have weights."""
    weights = TokenWeights(weight_T=torch.arange(12.0))
    return replace(make_pack(), others={SOUND: sound_of().with_method(weights)})


def problem(pack: PackedBatch):
    rng = torch.Generator().manual_seed(5)
    noise = {n: torch.randn(s.latent_TC.shape, generator=rng) for n, s in pack.streams.items()}
    return problem_of_streams(training_objective(FLOW), pack, LEVELS, noise), noise


def test_all_streams_travel_between_processes(pack) -> None:
    assert [*pack.streams] == [LATENTS, SOUND] and pack.streams[LATENTS] is pack
    assert {"others.sound.latent_TC", "others.sound.TokenWeights.weight_T"} < pack.tensors.keys()
    for sent in (unflatten_pack(*flatten_pack(pack)), pickle.loads(pickle.dumps(pack))):
        assert sent.others[SOUND].starts == (0, 8, 8, 12)
        assert sent.others[SOUND].num_tokens == LENGTHS
        assert sent.tensors.keys() == pack.tensors.keys()
        for name, tensor in pack.tensors.items():
            assert torch.equal(sent.tensors[name].nan_to_num(), tensor.nan_to_num()), name


def test_each_stream_has_levels_noise_and_a_target_of_its_own(pack) -> None:
    whole, noise = problem(pack)
    alone = replace(pack, others={})
    only = {LATENTS: LEVELS[LATENTS]}
    plain = problem_of_streams(training_objective(FLOW), alone, only, noise)
    assert not plain.others
    for name in ("input_TC", "level_M", "target_TC", "weight_N", "noise_N"):
        assert torch.equal(getattr(whole, name), getattr(plain, name)), name
    own, sound = whole.others[SOUND], pack.others[SOUND]
    assert torch.equal(own.level_M, 1000 * LEVELS[SOUND]) and own.input_TC.shape == (12, WIDTH)
    for token, sample in enumerate(sound.segment_T.tolist()):
        if not sound.is_real_T[token]:
            assert not own.input_TC[token].any() and not own.target_TC[token].any()
            continue
        level, x, n = LEVELS[SOUND][sample], sound.latent_TC[token], noise[SOUND][token]
        torch.testing.assert_close(own.input_TC[token], (1 - level) * x + level * n)
        torch.testing.assert_close(own.target_TC[token], n - x)


def test_clean_tokens_of_one_stream_leave_the_levels_of_the_others(pack) -> None:
    sound = pack.others[SOUND].with_method(CleanTokens(level=0.0, counts=(2, 0, 0)))
    whole, _ = problem(replace(pack, others={SOUND: sound}))
    assert sound.num_levels == 6 and pack.num_levels == 3
    assert whole.level_M.shape == (3,) and whole.others[SOUND].level_M.shape == (6,)


@pytest.mark.parametrize("mean", list(LossMean))
def test_losses_of_streams_add_up_on_one_rank_and_on_two(pack, mean) -> None:
    """Against a plain loop: mean errors of a sound weigh as those of the other tokens."""
    options = replace(FLOW, loss_mean=mean, sound_weight=0.25)
    whole, _ = problem(pack)
    targets = {LATENTS: whole.target_TC, SOUND: whole.others[SOUND].target_TC}
    said = {name: 2 * target_TC + 1 for name, target_TC in targets.items()}
    wanted = 0.0
    for name, stream in pack.streams.items():
        weights = stream.method(TokenWeights)
        for sample, number in enumerate(stream.num_tokens):
            rows = slice(stream.starts[sample], stream.starts[sample] + number)
            error_T = (targets[name][rows] + 1).double().square().mean(1)
            error_T = error_T if weights is None else error_T * weights.weight_T[rows]
            counts = pack.num_tokens[sample] if mean is LossMean.TOKEN else 1
            weight = 1 if name == LATENTS else options.sound_weight
            wanted += weight * counts * float(error_T.sum()) / max(number, 1)
    found = loss_of(pack, whole, said, options)
    assert float(found.total) == pytest.approx(wanted, rel=1e-5)
    main = loss_of(pack, whole, said[LATENTS], options)
    assert found.count == main.count and found.total > main.total
    parts = []
    for index in range(2):
        share = SequenceShard(index=index, count=2)
        mine, part = split_tokens(pack, whole, share=share, multiple=MULTIPLE)
        told = {LATENTS: 2 * part.target_TC + 1, SOUND: 2 * part.others[SOUND].target_TC + 1}
        parts.append(loss_of(mine, part, told, options))
    assert float(sum(one.total for one in parts)) == pytest.approx(wanted, rel=1e-5)
    assert sum(one.count for one in parts) == found.count


def test_samples_whose_sound_has_no_finite_loss_are_named(pack) -> None:
    whole, _ = problem(pack)
    said = {LATENTS: whole.target_TC, SOUND: whole.others[SOUND].target_TC.clone()}
    assert RankLoss.of([(loss_of(pack, whole, said, FLOW), pack)]).not_finite == ()
    said[SOUND][pack.others[SOUND].starts[2]] = math.inf
    assert RankLoss.of([(loss_of(pack, whole, said, FLOW), pack)]).not_finite == ("k2",)


def test_ranks_have_their_parts_of_every_stream_and_what_the_network_is_fed(pack) -> None:
    whole, _ = problem(pack)
    seen = {name: [] for name in pack.streams}
    for index in range(2):
        share = SequenceShard(index=index, count=2)
        mine, part = split_tokens(pack, whole, share=share, multiple=MULTIPLE)
        assert all(stream.share == share for stream in mine.streams.values())
        sound, fed = mine.others[SOUND], mine.others[SOUND].method(NoisyTokens)
        assert torch.equal(fed.input_TC, part.others[SOUND].input_TC)
        assert torch.equal(fed.level_M, whole.others[SOUND].level_M)
        assert len(sound.segment_T) == len(fed.input_TC) == 8  # 6, filled up
        for name, stream in mine.streams.items():
            seen[name] += stream.latent_TC[stream.is_real_T][:, 0].tolist()
    for name, stream in pack.streams.items():
        assert sorted(seen[name]) == sorted(stream.latent_TC[stream.is_real_T][:, 0].tolist())


def test_a_pack_without_any_token_of_a_stream_has_idle_rows(pack) -> None:
    """So that every weight of the stream has a gradient, if of zeros."""
    silent = replace(pack, others={SOUND: sound_of((0, 0, 0))})
    whole, _ = problem(silent)
    mine, part = split_tokens(silent, whole, share=WHOLE, multiple=MULTIPLE)
    sound = mine.others[SOUND]
    assert sound.starts == (0, 0, 0, 0) and len(sound.segment_T) == MULTIPLE
    assert not sound.is_real_T.any() and part.others[SOUND].input_TC.shape == (MULTIPLE, WIDTH)
    said = {LATENTS: part.target_TC, SOUND: torch.full((MULTIPLE, WIDTH), math.nan)}
    assert loss_of(mine, part, said, FLOW).total == 0
