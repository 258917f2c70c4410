"""Adam's settings are the run's own after a resume; a checkpoint has its moments and its count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.config import (
    DdpConfig,
    LoraConfig,
    MomentType,
    OptimizerConfig,
    ParameterGroup,
    Precision,
    RunConfig,
)
from dit.config.training import MOMENTS
from dit.distributed.data_parallel import main_param_shards
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.optimizer.states import load_optimizer_groups, optimizer_values, state_prefix
from dit.train.optimizer.update import learning_rate
from dit.train.step import optimizer_step
from tests.families.wan import wan_model
from tests.resuming import built, resumed, saved

STEPS = 3
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}
GROUPS = (
    ParameterGroup(pattern="blocks.0.*", lr=3e-2, weight_decay=0.3),
    ParameterGroup(pattern="*ffn*", lr_factor=0.5),
)
NARROW = {"exp_avg_dtype": MomentType.FP16, "exp_avg_sq_dtype": MomentType.FP8}


def _run(*, precision=Precision.FP32, sharded=True, lora=None, **optimizer) -> RunConfig:
    return RunConfig(
        model=wan_model(precision=precision),
        optimizer=OptimizerConfig(**(OPTIONS | optimizer)),
        ddp=DdpConfig(use_distributed_optimizer=sharded),
        lora=lora or LoraConfig(),
    )


RUNS = {
    "sharded": _run(),
    "whole": _run(sharded=False),
    "sharded, bf16": _run(precision=Precision.BF16),
    "whole, bf16": _run(precision=Precision.BF16, sharded=False),
    "on the host": _run(optimizer_cpu_offload=True),
    "groups": _run(groups=GROUPS),
    "adapters": _run(lora=LoraConfig(rank=2, plus_ratio=4.0)),
    "fewer bits": _run(**NARROW),
}
CHANGES = {
    "adam_beta1": 0.5,
    "adam_beta2": 0.7,
    "adam_eps": 0.3,
    "lr": 2e-2,
    "weight_decay": 0.2,
    "min_lr": 1e-2,
}


def _gradients(model: ModelAndOptimizer, number: int) -> dict[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    trained = (p for p in model.chunks[0].module.parameters() if p.requires_grad)
    return {p: torch.randn(p.shape, generator=generator) for p in trained}


def _step(model: ModelAndOptimizer, config: RunConfig, number: int) -> None:
    for p, gradient in _gradients(model, number).items():
        p.main_grad.copy_(gradient)
    optimizer_step(model, config=config, number=number, loss=1.0)


def _of_each(model: ModelAndOptimizer, name: str) -> list[float]:
    """A setting of the group of each main parameter."""
    found = {p: group[name] for group in model.optimizer.param_groups for p in group["params"]}
    return [found[shard.value] for shard in main_param_shards(model.optimizer)]


def _adamw(model: ModelAndOptimizer, config: RunConfig, number: int) -> list[torch.Tensor]:
    """What AdamW makes of the main parameters in its `number`-th step: Algorithm 2 of its paper."""
    c, rate, wanted = config.optimizer, learning_rate(config, number), []
    values = optimizer_values(model.optimizer, MOMENTS)
    moments = zip(*(values[state_prefix(name)] for name in MOMENTS), strict=True)
    factors = zip(_of_each(model, "lr_mult"), _of_each(model, "wd_mult"), strict=True)
    gradients = _gradients(model, number)
    for shard, (mean, square), (lr_mult, wd_mult) in zip(
        main_param_shards(model.optimizer), moments, factors, strict=True
    ):
        g = gradients[shard.weight].flatten()[shard.part].view_as(shard.value)
        mean = c.adam_beta1 * mean + (1 - c.adam_beta1) * g
        square = c.adam_beta2 * square + (1 - c.adam_beta2) * g.square()
        root = (square / (1 - c.adam_beta2**number)).sqrt() + c.adam_eps
        moved = lr_mult * rate * mean / (1 - c.adam_beta1**number) / root
        kept = 1 - lr_mult * rate * wd_mult * c.weight_decay
        wanted.append(shard.value * kept - moved)
    return wanted


@pytest.mark.parametrize("kind", RUNS)
def test_settings_of_adam_take_effect_at_a_resume(groups, tmp_path, request, kind):
    if kind == "fewer bits":
        request.getfixturevalue("engine")
    before = RUNS[kind]
    after = replace(before, optimizer=replace(before.optimizer, **CHANGES))
    model = built(before, groups)
    for number in range(1, STEPS + 1):
        _step(model, before, number)
    again = resumed(saved(tmp_path, model, before, steps=STEPS), after, groups)
    wanted = _adamw(again, after, STEPS + 1)
    same = _adamw(again, replace(after, optimizer=before.optimizer), STEPS + 1)
    _step(again, after, STEPS + 1)
    rates = [rate / learning_rate(after, STEPS + 1) for rate in _of_each(again, "lr")]
    assert rates == pytest.approx(_of_each(again, "lr_mult"))
    if kind == "groups":  # what a group says outright stays, what it says as a factor follows
        assert sorted(set(rates)) == pytest.approx([0.5, 1.0, 1.5])
    for shard, value, unchanged in zip(
        main_param_shards(again.optimizer), wanted, same, strict=True
    ):
        torch.testing.assert_close(shard.value, value, rtol=1e-5, atol=1e-6)
        assert (value - unchanged).abs().max() > 1e-3


def test_a_group_without_weights_on_the_rank_that_saved_counts_as_the_others_do(groups):
    """FusedAdam does not count the updates of a group that has no parameter on its rank."""
    model = built(RUNS["sharded"], groups)
    stored = [{"wd_mult": 0.0, "lr_mult": 1.0}, {"wd_mult": 1.0, "lr_mult": 1.0, "step": 7}]
    load_optimizer_groups(model.optimizer, {"optimizer": {"param_groups": stored}})
    assert {group["step"] for group in model.optimizer.param_groups} == {7}
