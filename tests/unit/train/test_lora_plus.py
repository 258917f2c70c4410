"""`lora.plus_ratio`: B of adapters learns faster than A, as in a plain loop with two groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dit.checkpoint_paths import CheckpointError
from dit.config import (
    LoraConfig,
    OptimizerConfig,
    ParameterGroup,
    Problems,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)
from dit.lora.checkpoint import DRAWN, AdapterRun
from dit.lora.targets import chosen_adapters
from dit.models.layers.adaptable import is_up
from dit.train.checkpoint.async_save import Saver
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.optimizer.update import learning_rate
from dit.train.step import optimizer_step
from tests.families.wan import wan_model
from tests.unit.train.test_checkpoint import DATA

RATIO, STEPS, HALF = 16.0, 6, 3
CONFIG = RunConfig(
    model=wan_model(),
    lora=LoraConfig(rank=2, plus_ratio=RATIO),
    optimizer=OptimizerConfig(lr=3e-3, min_lr=1e-4, weight_decay=0.2, clip_grad=0.0),
    scheduler=SchedulerConfig(lr_warmup_iters=2),
    train=TrainConfig(train_iters=STEPS),
)


def _built(config: RunConfig, groups, seed: int = 2):
    adapters = chosen_adapters(config.model, config.lora)
    return build_model_and_optimizer(
        config, groups, fill=partial(randomise, seed=seed), adapters=adapters
    )


def _trained(model) -> dict[str, torch.nn.Parameter]:
    named = model.chunks[0].module.named_parameters()
    return {name: p for name, p in named if p.requires_grad}


def _gradient(step: int, p: torch.Tensor) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(step))


def _step(model, number: int, config: RunConfig = CONFIG) -> None:
    for p in _trained(model).values():
        p.main_grad.copy_(_gradient(number, p))
    optimizer_step(model, config=config, number=number, loss=1.0)


def test_it_is_adamw_with_two_groups(groups):
    model = _built(CONFIG, groups)
    plain = {name: torch.nn.Parameter(p.detach().clone()) for name, p in _trained(model).items()}
    down = [p for name, p in plain.items() if not is_up(name)]
    up = [p for name, p in plain.items() if is_up(name)]
    assert len(down) == len(up) == len(chosen_adapters(CONFIG.model, CONFIG.lora))
    c = CONFIG.optimizer
    adamw = torch.optim.AdamW(
        [{"params": down}, {"params": up}],
        betas=(c.adam_beta1, c.adam_beta2),
        eps=c.adam_eps,
        weight_decay=c.weight_decay,
    )
    for number in range(1, STEPS + 1):
        _step(model, number)
        rate = learning_rate(CONFIG, number)
        for group, factor in zip(adamw.param_groups, (1.0, RATIO), strict=True):
            group["lr"] = rate * factor
        for p in plain.values():
            p.grad = _gradient(number, p)
        adamw.step()
        for name, p in _trained(model).items():
            torch.testing.assert_close(p, plain[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_resume_goes_on_bit_for_bit(groups, tmp_path):
    whole = _built(CONFIG, groups)
    for number in range(1, HALF + 1):
        _step(whole, number)
    adapted = AdapterRun(adapters=whole.adapters, base=DRAWN)
    saver = Saver(tmp_path, CONFIG, adapters=adapted.as_json())
    saver.begin(whole, progress=TrainProgress(step=HALF), data=DATA)
    place = saver.finish().path
    saver.close()
    again = _built(CONFIG, groups, seed=3)
    load_checkpoint(place, again, config=CONFIG)
    for model in (whole, again):
        for number in range(HALF + 1, STEPS + 1):
            _step(model, number)
    ours, theirs = _trained(whole), _trained(again)
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
    other = replace(CONFIG, lora=replace(CONFIG.lora, plus_ratio=4.0))
    with pytest.raises(CheckpointError, match=r"lora\.plus_ratio: 16\.0 in .*, 4\.0 here"):
        load_checkpoint(place, _built(other, groups), config=other)


def test_it_needs_adapters_and_no_groups_of_weights():
    for wrong in ({"plus_ratio": 16.0}, {"rank": 2, "plus_ratio": 0.0}):
        with pytest.raises(Problems, match="plus_ratio"):
            LoraConfig(**wrong)
    groups = (ParameterGroup(pattern="*", lr_factor=2.0),)
    with pytest.raises(Problems, match=r"leave optimizer\.groups out"):
        replace(CONFIG, optimizer=replace(CONFIG.optimizer, groups=groups))
