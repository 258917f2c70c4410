"""What is measured between log steps: against definitions, and without a trace in training."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from functools import partial

import numpy as np
import pytest
import torch

from dit.config import (
    DdpConfig,
    EmaConfig,
    EmaKind,
    LoggerConfig,
    LossMean,
    ObjectiveConfig,
    ObjectiveName,
    Precision,
)
from dit.data import dataset_sizes
from dit.models.dit.family import FAMILY
from dit.objectives.pack_draws import Draw, pack_rng
from dit.objectives.registry import training_objective
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.training_target import training_problem
from dit.train.checkpoint.state_dict import TrainProgress
from dit.train.metrics.interval_metrics import (
    DataStats,
    IntervalMetrics,
    edges_and_counts,
)
from dit.train.metrics.norms import EMBEDDERS, part_of
from dit.train.metrics.step_metrics import (
    ON_DEVICE,
    StepMetrics,
    over_ranks,
    samples_of_datasets,
    sum_over_ranks,
)
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.step import forward_backward, optimizer_step
from tests.learning import assert_equal, tiny_run, weights_and_averages
from tests.packs import random_pack

PARTS = [EMBEDDERS, *dict.fromkeys(FAMILY.parts.values())]
part_here = partial(part_of, parts=FAMILY.parts)

GRIDS = [[(1, 4, 4), (5, 2, 2), (1, 2, 2)], [(1, 4, 4), (1, 8, 8), (1, 1, 1), (2, 3, 3)]]
TEXTS = [[5, 2, 3], [1, 3, 2, 2]]
NO_DROPOUT = ObjectiveConfig(text_dropout=0.0)


def _model(groups, config):
    return build_model_and_optimizer(config, groups, fill=partial(randomise, seed=2))


def _items(config, objective, step):
    packs = [
        replace(random_pack(grids, texts, model=config.model), pack_id=number)
        for number, (grids, texts) in enumerate(zip(GRIDS, TEXTS, strict=True))
    ]
    null = {"text": torch.zeros(1, 8)}
    return [
        training_problem(objective, pack, seed=1, step=step, null=null, options=NO_DROPOUT)
        for pack in packs
    ]


def _train(groups, config, *, steps, interval_metrics=True):
    """Learner, what was read at each log step, and the reports of all steps."""
    model, objective = _model(groups, config), training_objective(config.objective)
    metrics = IntervalMetrics(config, model, objective) if interval_metrics else None
    read, reports = [], []
    for step in range(1, steps + 1):
        items = _items(config, objective, step)
        report = forward_backward(model, items, objective=config.objective)
        reports.append((items, report))
        if metrics is not None:
            metrics.before_update(step)
        done = optimizer_step(model, config=config, number=step, loss=report.total / report.count)
        if metrics is not None:
            metrics.add_packs([pack for pack, _ in items])
            metrics.add_losses(items, report)
            read.append(metrics.read(TrainProgress(step=step), done) | {"whole": done.grad_norm})
    return model, read, reports


def _config(**changes):
    config = tiny_run()
    config = replace(config, train=replace(config.train, train_iters=10, global_batch_size=2))
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-2, clip_grad=0.01))
    return replace(config, logger=LoggerConfig(log_interval=2), **changes)


@pytest.mark.parametrize("mean", list(LossMean))
@pytest.mark.parametrize("name", list(ObjectiveName))
def test_loss_by_level_is_the_mean_over_samples_of_its_quantiles(groups, name, mean):
    config = _config()
    changes = {"name": name, "loss_mean": mean, "shift_base_tokens": 16}
    config = replace(config, objective=replace(config.objective, **changes))
    _, read, reports = _train(groups, config, steps=4)
    assert all("loss_q10" not in read[index] for index in (0, 2))

    wanted: dict[str, np.ndarray] = {}
    for step, (items, report) in enumerate(reports[2:4], start=3):
        for (pack, _), (loss, part) in zip(items, report.packs, strict=True):
            draws = {"seed": 1, "step": step, "pack_id": pack.pack_id, "draw": Draw.LEVELS}
            rng = pack_rng(device=torch.device("cpu"), **draws)
            quantile_N = draw_quantiles(pack.num_samples, rng)
            for quantile, both in zip(quantile_N, loss.of_samples(part), strict=True):
                key = f"loss_q{100 * (math.floor(quantile * 5) + 0.5) / 5:.3g}"
                wanted[key] = wanted.get(key, np.zeros(2)) + both.numpy()
    found = {key: value for key, value in read[3].items() if key.startswith("loss_q")}
    assert found.keys() == wanted.keys() and len(found) > 2
    for key, (error, count) in wanted.items():
        assert found[key] == pytest.approx(error / count, rel=1e-12)
    total = sum(r.total for _, r in reports[2:4]) / sum(r.count for _, r in reports[2:4])
    assert sum(e for e, _ in wanted.values()) / sum(c for _, c in wanted.values()) == (
        pytest.approx(total, rel=1e-6)
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("sharded", [True, False])
def test_norms_are_those_of_the_tensors(groups, sharded, precision):
    config = _config(ddp=DdpConfig(use_distributed_optimizer=sharded))
    config = replace(config, model=replace(config.model, precision=precision))
    objective, model = training_objective(config.objective), _model(groups, config)
    metrics = IntervalMetrics(config, model, objective)
    before = [shard.value.detach().clone() for shard in model.ema.shards]
    report = forward_backward(
        model, items := _items(config, objective, 2), objective=config.objective
    )
    wanted = dict.fromkeys(PARTS, 0.0)
    for name, weight in model.chunks[0].named_parameters():
        wanted[part_here(name)] += weight.main_grad.double().square().sum().item()
    metrics.before_update(2)
    done = optimizer_step(model, config=config, number=1, loss=report.total / report.count)
    metrics.add_losses(items, report)
    values = metrics.read(TrainProgress(step=2), done)

    assert done.grad_norm == pytest.approx(math.sqrt(sum(wanted.values())), rel=1e-5)
    assert done.grad_norm > config.optimizer.clip_grad
    for part, square in wanted.items():
        assert square > 0
        assert values[f"grad_norm_{part}"] == pytest.approx(math.sqrt(square), rel=1e-4)

    after = [shard.value for shard in model.ema.shards]

    def norm(tensors) -> float:
        return math.sqrt(sum(t.double().square().sum().item() for t in tensors))

    weight = norm(after)
    moved = norm(a - b for a, b in zip(after, before, strict=True))
    apart = norm(a - e for a, e in zip(after, model.ema.averages, strict=True))
    assert values["weight_norm"] == pytest.approx(weight, rel=1e-5)
    assert values["update_ratio"] == pytest.approx(moved / weight, rel=1e-5) and moved > 0
    assert values["ema_distance"] == pytest.approx(apart / weight, rel=1e-5, abs=1e-12)


def _interrupted(metrics, items, reports, *, config):
    """Gauges that saw some steps, and others that go on from what a checkpoint keeps of them."""
    for batch, report in zip(items, reports, strict=True):
        metrics.add_packs([pack for pack, _ in batch])
        metrics.add_losses(batch, report)
    later = IntervalMetrics(config, metrics.norms.model, metrics.loss_by_level.objective)
    return later, later.load_state_dict(metrics.state_dict())


def test_sums_of_an_interval_go_on_to_the_bit(groups):
    config = _config()
    model, _, reports = _train(groups, config, steps=2)
    objective = training_objective(config.objective)
    items, losses = zip(*reports, strict=True)
    metrics = IntervalMetrics(config, model, objective)
    later, other = _interrupted(metrics, items, losses, config=config)
    assert other == []
    assert metrics.loss_by_level.count_Q.sum() > 0 and metrics.data_stats.tokens > 0
    for part in ("loss_by_level", "data_stats"):
        before, after = getattr(metrics, part).sums, getattr(later, part).sums
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not later.load_state_dict({})  # of a checkpoint of an earlier version


def test_sums_of_more_ranks_are_added_and_of_other_parts_begin_anew(groups):
    config = _config()
    model, _, reports = _train(groups, config, steps=1)
    objective = training_objective(config.objective)
    metrics = IntervalMetrics(config, model, objective)
    items, losses = zip(*reports, strict=True)
    _interrupted(metrics, items, losses, config=config)
    kept = {name: torch.cat([rows, 2 * rows]) for name, rows in metrics.state_dict().items()}
    later = IntervalMetrics(config, model, objective)
    assert later.load_state_dict(kept) == []
    assert torch.equal(later.loss_by_level.error_Q, 3 * metrics.loss_by_level.error_Q)
    longer = replace(config, dataset=replace(config.dataset, task_encoder_seq_length=4096))
    later = IntervalMetrics(longer, model, objective)
    assert later.load_state_dict(kept) == ["tokens_per_sample"]
    assert not later.data_stats.tokens.any() and not later.data_stats.samples_of_length.any()
    assert torch.equal(later.loss_by_level.error_Q, 3 * metrics.loss_by_level.error_Q)


def test_every_number_of_a_step_comes_back_under_its_name(groups):
    """All differ, and the ranks may name them in any order."""
    names = [f.name for f in fields(StepMetrics) if f.name != "of_datasets"]
    numbers = {name: float(2**i) for i, name in enumerate(names)}
    mine = StepMetrics(**numbers, of_datasets={"dogs": 1024, "count": 4096})
    of_host = {name: value for name, value in asdict(mine).items() if name not in ON_DEVICE}
    on_device = torch.tensor([numbers[name] for name in ON_DEVICE], dtype=torch.float64)
    assert over_ranks(of_host, on_device) == mine
    turned = sum_over_ranks(dict(reversed(numbers.items())))
    assert turned == numbers and list(turned) == sorted(names)


def test_training_does_not_notice(groups):
    with_metrics, read, _ = _train(groups, _config(), steps=5)
    without, _, _ = _train(groups, _config(), steps=5, interval_metrics=False)
    assert any("update_ratio" in values for values in read)
    assert_equal(weights_and_averages(with_metrics), weights_and_averages(without))


def test_a_step_that_is_not_finite_has_no_norms(groups):
    config = _config()
    objective, model = training_objective(config.objective), _model(groups, config)
    metrics = IntervalMetrics(config, model, objective)
    forward_backward(model, _items(config, objective, 2), objective=config.objective)
    metrics.before_update(2)
    done = optimizer_step(model, config=config, number=1, loss=math.nan)
    values = metrics.read(TrainProgress(step=2), done)
    assert done.skipped and not any("norm" in name or "loss" in name for name in values)


def test_without_an_average_there_is_no_distance_to_it(groups):
    config = _config(ema=EmaConfig(kind=EmaKind.NONE))
    _, read, _ = _train(groups, config, steps=2)
    assert "weight_norm" in read[1] and "ema_distance" not in read[1]


def test_lengths_of_samples_are_within_a_tenth():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(0, math.log(4096), size=5000)).astype(int).clip(1)
    seen = DataStats(capacity=4096, sizes={})
    for part in np.array_split(lengths, 7):
        seen.add([_pack_of([int(n) for n in part], ["k"] * len(part))])
    values = seen.values(seen.sums, TrainProgress())
    assert values["tokens_per_sample_mean"] == pytest.approx(lengths.mean())
    for percent in (10, 50, 90):
        true = np.quantile(lengths, percent / 100, method="inverted_cdf")
        assert true <= values[f"tokens_per_sample_p{percent}"] + 1 <= 1.1 * true + 2
    # Each bin has the samples that are longer than those of the bins before it.
    bins, shorter = values["tokens_per_sample"], 0
    for longest, count in bins:
        assert count == ((lengths > shorter) & (lengths <= longest)).sum() > 0
        shorter = longest
    assert sum(count for _, count in bins) == 5000


def test_bins_side_by_side_have_empty_ones_between():
    edges, counts = edges_and_counts([(1, 2), (16, 7), (17, 4), (64, 1)])
    assert counts == [2, 0, 7, 4, 0, 1] and len(edges) == 7
    assert edges == sorted(set(edges)) and {1.0, 16.0, 17.0, 64.0} < set(edges)
    assert 14 < edges[2] < 16 and 58 < edges[5] < 64


def test_samples_are_counted_by_dataset_and_pass():
    blend = DataStats(capacity=64, sizes={"cats": 10, "dogs": 20})
    packs = [_pack_of([4, 4, 8], ["cats/1", "dogs/a/2", "cats/3"])]
    assert samples_of_datasets(packs, blend.names) == {"cats": 2, "dogs": 1}
    progress = TrainProgress(of_datasets={"cats": 4}).after(
        samples=3, of_datasets={"cats": 2, "dogs": 1}, skipped=True
    )
    values = blend.values(blend.sums, progress)
    wanted = {"samples_cats": 6, "samples_dogs": 1, "epoch_cats": 0.6, "epoch_dogs": 0.05}
    assert values == wanted
    alone = DataStats(capacity=64, sizes={"": 12})
    assert samples_of_datasets(packs, alone.names) == {}
    values = alone.values(alone.sums, TrainProgress(consumed_samples=30))
    assert values == {"epoch": 2.5}


def test_mock_data_have_no_datasets():
    assert dataset_sizes(tiny_run().dataset) == {}


def _pack_of(lengths, keys):
    """As much of a pack as counting needs."""
    base = random_pack([(1, 1, 1)], [1], model=tiny_run().model)
    return replace(base, grids=tuple((1, 1, n) for n in lengths), keys=tuple(keys))


def test_every_part_of_the_model_is_named():
    assert part_here("module.decoder.layers.3.self_attention.linear_qkv.weight") == "attention"
    assert part_here("module.decoder.layers.3.modulate_mlp.linear_1.weight") == "modulation"
    assert part_here("module.proj_out.weight") == part_here("module.modulate_out.x") == "head"
    assert (
        part_here("module.level.norm.weight") == part_here("module.text_proj.bias") == "embedders"
    )
