"""Two levels in a sample: its parts are samples of their own, which share texts and no token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.batch import CleanTokens, LatentSample, Parts, Problem, ReferenceGrids, SequenceShard
from dit.config import LoraConfig, LossMean, ObjectiveConfig, ObjectiveName, Preference, Problems
from dit.config.sparsity import TokenShare, trained_as
from dit.data.pack import SampleSize
from dit.distributed.model_parallel import split_tokens
from dit.models.dit.model import DiT
from dit.models.patch_layout import PatchLayout
from dit.objectives.registry import training_objective
from dit.objectives.token_draws import draw_parts, draw_route
from dit.objectives.training_target import training_problem
from dit.planner.times import expected_load
from dit.sizing.flops import training_flops
from dit.train.loss import Loss, loss_of
from dit.train.metrics.step_metrics import samples_of_datasets
from dit.train.model_and_optimizer import randomise
from tests.learning import assert_equal, tiny_run, weights_and_averages
from tests.packs import random_pack, tiny_model
from tests.resuming import STEPS, built, resumed, saved, step
from tests.toy_networks import NETWORKS, level_rows, toy_model, toy_pack

GRIDS, TEXTS = [(1, 4, 6), (3, 3, 5), (1, 1, 1), (2, 4, 3)], [9, 4, 4, 30]


def _network(groups, name: str):
    model = tiny_model() if name == "dit" else toy_model(name)
    network = NETWORKS.get(name, DiT)(model, groups)
    randomise(network, seed=7)
    return network


def _pack(name: str, *, multiple: int = 16):
    if name == "dit":
        return random_pack(GRIDS, TEXTS, multiple=multiple, model=tiny_model())
    return toy_pack(toy_model(name), GRIDS, TEXTS, multiple=multiple)


def _parted(batch, *, rate: float = 0.25, seed: int = 3):
    return draw_parts(batch, TokenShare.of_rate(rate), torch.Generator().manual_seed(seed))


def _sources(parted) -> tuple[int, ...]:
    return parted.method(Parts).of


def _rows(batch, parted) -> list[torch.Tensor]:
    """Rows of the whole pack that each part has; no two real tokens of these packs are equal."""
    found = []
    for n, (start, stop) in enumerate(pairwise(parted.starts)):
        real = parted.latent_TC[start:stop][: parted.num_tokens[n]]
        same = (real[:, None] == batch.latent_TC).all(2) & batch.is_real_T
        assert (same.sum(1) == 1).all()
        found.append(same.long().argmax(1))
    return found


@pytest.mark.parametrize("rate", [0.25, 0.5])
@pytest.mark.parametrize("name", ["cross", "wan_ti2v", "flux"])
def test_the_parts_have_each_token_once_with_all_that_is_known_of_it(name, rate):
    batch = _pack(name)
    parted, share = _parted(batch, rate=rate), TokenShare.of_rate(rate)
    rows = _rows(batch, parted)
    assert _sources(parted) == (0, 0, 1, 1, 2, 3, 3)  # one of a token stays whole
    every = torch.cat(rows)
    assert torch.equal(every.sort().values, batch.is_real_T.nonzero().flatten())
    assert torch.equal(parted.position_TA[parted.is_real_T], batch.position_TA[every])
    assert torch.equal(parted.is_target_T[parted.is_real_T], batch.is_target_T[every])
    clean_T = batch.level_row_T[every] >= batch.num_samples
    levels_T = parted.segment_T[parted.is_real_T] + parted.num_samples * clean_T
    assert torch.equal(parted.level_row_T[parted.is_real_T], levels_T)
    assert parted.starts[-1] == batch.starts[-1]
    for n, (source, mine) in enumerate(zip(_sources(parted), rows, strict=True)):
        assert torch.equal(mine, mine.sort().values)
        assert (batch.segment_T[mine] == source).all()
        first, stop = parted.starts[n : n + 2]
        assert (parted.segment_T[first:stop] == n).all()
        assert parted.loss_tokens[n] == parted.is_target_T[first:stop].sum() > 0
        for text, starts in parted.text_offsets.items():
            own = batch.texts[text][slice(*batch.text_offsets[text][source : source + 2])]
            assert torch.equal(parted.texts[text][slice(*starts[n : n + 2])], own)
        assert all(torch.equal(v[n], batch.vectors[k][source]) for k, v in parted.vectors.items())
        assert (parted.keys[n], parted.grids[n]) == (batch.keys[source], batch.grids[source])
    assert sum(parted.loss_tokens) == sum(batch.loss_tokens)
    trained = [one for real in batch.num_tokens for one in trained_as(real, 0, share)]
    assert [real for real, _ in trained] == [*parted.num_tokens]
    assert not torch.equal(_parted(batch, rate=rate, seed=4).latent_TC, parted.latent_TC)


@pytest.mark.parametrize("name", ["dit", "cross", "wan_ti2v", "flux"])
def test_a_part_is_computed_as_if_the_other_were_not_there(groups, name):
    """The tokens of a part in a pack of their own, made of the whole pack by rows."""
    network, batch = _network(groups, name), _pack(name)
    parted = _parted(batch)
    quantiles = torch.linspace(0.1, 0.9, parted.num_samples)
    with torch.no_grad():
        out_TC = network(parted.latent_TC, level_rows(quantiles, parted), parted)
        for n, (source, rows) in enumerate(
            zip(_sources(parted), _rows(batch, parted), strict=True)
        ):
            few = _alone(batch, source, rows)
            wanted = network(few.latent_TC, level_rows(quantiles[n : n + 1], few), few)
            start = parted.starts[n]
            found = out_TC[start : start + len(rows)]
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def _alone(batch, source: int, rows: torch.Tensor):
    """The tokens `rows` of one sample, as a latent of one row; it does not know of any parts."""
    tensors = {name: x[rows] for name, x in batch.token_tensors.items()}
    clean = batch.level_row_T[rows] >= batch.num_samples
    spans = {name: of[source : source + 2] for name, of in batch.text_offsets.items()}
    alone = batch.with_tensors(tensors).without(ReferenceGrids)
    if (given := batch.method(CleanTokens)) is not None:
        alone = alone.with_method(replace(given, counts=(0,)))
    return replace(
        alone,
        segment_T=torch.zeros_like(rows),
        level_row_T=clean.long(),
        texts={name: batch.texts[name][slice(*span)] for name, span in spans.items()},
        text_offsets={name: (0, stop - start) for name, (start, stop) in spans.items()},
        vectors={name: x[source : source + 1] for name, x in batch.vectors.items()},
        fps_N=batch.fps_N[source : source + 1],
        grids=((1, 1, len(rows)),),
        starts=(0, len(rows)),
        keys=batch.keys[source : source + 1],
    )


SHARES = [{"count": 2}, {"count": 2, "halves": True}, {"count": 2, "contiguous": True}]


@pytest.mark.parametrize("kind", SHARES, ids=["parts", "ring", "pieces"])
def test_each_context_rank_counts_its_tokens_of_a_part(kind):
    batch, problem = _problem(_run(name=ObjectiveName.FLOW), _pack("wan_ti2v"))
    counts = torch.zeros(batch.num_samples, dtype=torch.int64)
    for index in range(2):
        share = SequenceShard(index=index, **kind)
        part, _ = split_tokens(batch, problem, share=share, multiple=1)
        here = torch.bincount(part.segment_T[part.is_target_T], minlength=batch.num_samples)
        assert here.tolist() == [*part.shared_loss_tokens]
        counts += here
    assert counts.tolist() == [*batch.loss_tokens]


def _run(**objective):
    config = tiny_run()
    options = replace(config.objective, second_level_rate=0.25, **objective)
    return replace(config, objective=options)


def _problem(config, pack, *, step: int = 2):
    null = {name: torch.zeros(1, rows.shape[1]) for name, rows in pack.texts.items()}
    options = config.objective
    objective = training_objective(options)
    return training_problem(objective, pack, seed=1, step=step, null=null, options=options)


def test_each_part_has_a_level_and_the_caption_of_its_sample_is_dropped_once():
    config, pack = _run(text_dropout=0.5), _pack("cross")
    dropped = set()
    for number in range(8):
        batch, problem = _problem(config, pack, step=number)
        levels = problem.noise_N.tolist()
        assert len({*levels}) == batch.num_samples
        texts = [*pairwise(batch.text_starts)]
        lengths = [stop - start for start, stop in texts]
        for first, second in ((0, 1), (2, 3), (5, 6)):
            assert _sources(batch)[first] == _sources(batch)[second]
            assert lengths[first] == lengths[second]
        dropped |= {length == 1 for length in lengths}
        # Noise and data of each token are those of its part's level.
        sigma_T1 = problem.noise_N[batch.segment_T, None]
        assert sigma_T1[batch.is_real_T].unique().numel() == batch.num_samples
    assert dropped == {True, False}


def test_the_parts_of_a_sample_count_once():
    pack = replace(_pack("cross"), keys=("a/1", "b/1", "a/2", "b/2"))
    parted = _parted(pack)
    assert parted.samples_read == (0, 2, 4, 5) and pack.samples_read == (0, 1, 2, 3)
    assert samples_of_datasets([pack, parted], ["a", "b"]) == {"a": 4, "b": 4}


@pytest.mark.parametrize("mean", LossMean)
def test_a_sample_of_two_levels_weighs_as_a_whole_one(mean):
    """Of equal errors of the tokens the loss is that of the pack as it was read."""
    pack, options = _pack("wan_ti2v"), ObjectiveConfig(name=ObjectiveName.FLOW, loss_mean=mean)
    parted, found = _parted(pack), list[Loss]()
    for batch in (pack, parted):
        says_TC = batch.latent_TC
        problem = Problem(
            input_TC=says_TC,
            level_M=torch.zeros(batch.num_levels),
            target_TC=torch.zeros_like(says_TC),
            weight_N=torch.ones(batch.num_samples),
            noise_N=torch.zeros(batch.num_samples),
        )
        found.append(loss_of(batch, problem, says_TC, options))
    whole, parts = found
    assert parted.num_samples > pack.num_samples and int(whole.count) == int(parts.count)
    torch.testing.assert_close(parts.total, whole.total)
    error_N, count_N = parts.of_samples(parted).unbind(1)
    if mean is LossMean.SAMPLE:
        means = [say.square().mean() for say in _said(parted)]
        wanted_N = torch.stack(means).double()  # rounded to float32
        torch.testing.assert_close(error_N / count_N, wanted_N, rtol=1e-6, atol=0)


def _said(batch) -> list[torch.Tensor]:
    """Latents of the tokens of each sample that have a loss."""
    rows = [batch.is_target_T & (batch.segment_T == n) for n in range(batch.num_samples)]
    return [batch.latent_TC[mine] for mine in rows]


@pytest.mark.parametrize("name", ["dit", "wan_ti2v"])
def test_counted_operations_are_those_of_torch(groups, name):
    network, grids = _network(groups, name), [(1, 4, 4), (1, 8, 2)]
    if name == "dit":
        batch = random_pack(grids, [4, 8], multiple=16, model=tiny_model())
    else:
        batch = toy_pack(toy_model(name), grids, [4, 8], multiple=16)
    parted = _parted(batch)
    levels = level_rows(torch.zeros(parted.num_samples), parted)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(parted.latent_TC, levels, parted)
    model = network.model
    assert counter.get_total_flops() == training_flops(model, parted) // 3


def test_a_route_goes_through_the_parts(groups):
    batch = _parted(_pack("cross"))
    model = toy_model("cross", route_from=1, route_to=2, route_rate=0.5)
    assert model.token_route is not None
    routed = draw_route(batch, model.token_route, torch.Generator().manual_seed(2))
    network = NETWORKS["cross"](model, groups)
    randomise(network, seed=7)
    levels = torch.linspace(0.1, 0.9, batch.num_samples)
    with torch.no_grad():
        both, plain = (network(batch.latent_TC, levels, pack) for pack in (routed, batch))
    assert torch.isfinite(both[batch.is_real_T]).all() and not torch.equal(both, plain)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(Problems, match=r"second_level_rate=0.7 must lie in \[0, 0.5\]"):
        ObjectiveConfig(second_level_rate=0.7)
    config = tiny_run()
    with pytest.raises(Problems, match=r"second_level_rate=0.3 sets 3 of 10 .*sample_multiple=80"):
        replace(config, objective=replace(config.objective, second_level_rate=0.3))
    with pytest.raises(Problems, match=r"objective\.second_level_rate, which divides"):
        pairs = {"second_level_rate": 0.25, "preference": Preference.DPO}
        objective = replace(config.objective, **pairs)
        replace(config, objective=objective, lora=LoraConfig(rank=2))


def test_text_that_is_attended_with_takes_room_for_both_levels():
    model = tiny_run().model
    sample = LatentSample(
        key="a",
        latent_CFHW=torch.zeros(model.in_channels, 1, 8, 8),
        text_LE=torch.zeros(5, model.crossattn_emb_size),
        fps=math.nan,
    )
    layouts = [PatchLayout.of_training(config) for config in (tiny_run(), _run())]
    plain, parted = (replace(layout, counts_text=True) for layout in layouts)
    sizes = [SampleSize.of(sample, layout) for layout in (plain, parted)]
    assert sizes[1].tokens == sizes[0].tokens + 5 and sizes[1].rows == sizes[0].rows
    assert parted.trained(10, 5) == [(8, 5), (2, 5)] and plain.trained(10, 5) == [(10, 5)]
    loads = [expected_load(one, fill=1.0) for one in (tiny_run(), _run())]
    assert loads[1].text == 2 * loads[0].text and loads[1].tokens == loads[0].tokens
    assert loads[1].attention < loads[0].attention


def test_a_resumed_run_draws_the_parts_of_one_that_was_not_stopped(groups, tmp_path):
    config = _run()
    straight = built(config, groups)
    for number in range(1, STEPS + 1):
        step(straight, config, number)
    place = saved(tmp_path, straight, config)
    step(straight, config, STEPS + 1)
    going_on = resumed(place, config, groups)
    step(going_on, config, STEPS + 1)
    assert_equal(weights_and_averages(going_on), weights_and_averages(straight))
