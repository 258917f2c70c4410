"""Fine-tuning from a Diffusers folder is the loop that one writes with Diffusers and torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.batch import SOUND, LatentSample, PackedBatch, Problem
from dit.config import RunConfig
from dit.config_loading import load_config
from dit.convert.load_hf.start import hf_start
from dit.data.pack import pack_samples
from dit.models.patch_layout import PatchLayout
from dit.models.positions import unpack_latents
from dit.models.registry import diffusers_form
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.step import forward_backward, optimizer_step
from recipes.runs import dit_debug, for_weights
from tests.families.case import Case
from tests.families.table import CASES
from tests.packs import random_samples

STEPS, RATE = 5, 1e-5
CAPTIONS, FPS = [7, 1, 11], [math.nan, 16.0, 30.0]


SETTINGS = (
    *("checkpoint.save=null", "model.precision=fp32"),
    *("objective.text_dropout=0", f"optimizer.lr={RATE}", "scheduler.lr_decay_style=constant"),
    *("dataset.mock=false", "ema.kind=none"),
)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_diffusers_and_torch(groups, resize, tmp_path, name):
    case, folder = CASES[name], tmp_path / "hf"
    case.random(seed=1, **case.trained).save_pretrained(folder)
    words = (*SETTINGS, *case.training, f"checkpoint.load_hf={folder}")
    config = load_config(dit_debug(), overrides=words, adapt=for_weights)
    start = hf_start(config)
    assert start is not None
    model = build_model_and_optimizer(config, groups, fill=start.fill)
    before = _values(model)
    theirs = diffusers_form(config.model).open_network(folder)
    theirs.train()
    adamw = _adamw(theirs, config)
    samples = random_samples(case.grids, CAPTIONS, model=config.model, fps=FPS)
    for number, sample in enumerate(samples):  # Diffusers' networks are run on latents alone
        others = {name: value for name, value in sample.others.items() if name != SOUND}
        samples[number] = replace(sample, others=others)
    losses = []
    for step in range(1, STEPS + 1):
        item = _problem(config, samples, step)
        ours = forward_backward(model, [item], objective=config.objective)
        optimizer_step(model, config=config, number=step, loss=ours.total)
        adamw.zero_grad()
        loss = _loss(theirs, samples, *item, config)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), config.optimizer.clip_grad)
        adamw.step()
        losses.append((ours.total / ours.count, loss.item()))
    assert all(abs(a - b) < 1e-5 * b for a, b in losses), losses
    theirs.save_pretrained(tmp_path / "after")
    words = (*words[:-1], f"checkpoint.load_hf={tmp_path / 'after'}")
    _assert_moved_alike(before, _values(model), _loaded(words, groups), case, config)


def _problem(
    config: RunConfig, samples: Sequence[LatentSample], step: int
) -> tuple[PackedBatch, Problem]:
    """The same samples at each step, with noise and levels of their own."""
    pack = pack_samples(samples, PatchLayout.of(config))
    objective = training_objective(config.objective)
    return training_problem(objective, pack, seed=3, step=step, null={}, options=config.objective)


def _adamw(network: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """No weight decay on norms, biases and tables."""
    plain = [p for n, p in network.named_parameters() if p.ndim < 2 or _is_table(n)]
    matrices = [p for n, p in network.named_parameters() if p.ndim > 1 and not _is_table(n)]
    c = config.optimizer
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": c.weight_decay}, {"params": plain}],
        lr=c.lr,
        betas=(c.adam_beta1, c.adam_beta2),
        eps=c.adam_eps,
        weight_decay=0.0,
    )


def _is_table(name: str) -> bool:
    return "scale_shift_table" in name or "pos_emb" in name


def _loss(
    network: nn.Module,
    samples: Sequence[LatentSample],
    batch: PackedBatch,
    problem: Problem,
    config: RunConfig,
) -> Tensor:
    """Mean over all tokens of the pack that are not given, one sample after the other."""
    model, form = config.model, diffusers_form(config.model)
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    fed = unpack_latents(problem.input_TC, batch, **patch)
    wanted = unpack_latents(problem.target_TC, batch, **patch)
    is_target_TC = batch.is_target_T[:, None].expand_as(problem.target_TC)
    learned = unpack_latents(is_target_TC, batch, **patch)
    total: Any = 0.0
    for i, sample in enumerate(samples):
        noisy = replace(sample, latent_CFHW=fed[i])
        level, guidance = float(problem.level_M[i]), config.objective.guidance
        made = form.run(network, noisy, level, model, guidance=guidance)
        error = (made - wanted[i]).square()[learned[i]].mean()
        total = total + problem.weight_N[i] * error * batch.loss_tokens[i]
    return total / sum(batch.loss_tokens)


def _values(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.chunks[0].module.named_parameters()}


def _loaded(words: Sequence[str], groups: Any) -> dict[str, Tensor]:
    config = load_config(dit_debug(), overrides=words, adapt=for_weights)
    start = hf_start(config)
    assert start is not None
    return _values(build_model_and_optimizer(config, groups, fill=start.fill))


def _assert_moved_alike(
    before: dict[str, Tensor],
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    case: Case,
    config: RunConfig,
) -> None:
    """Adam makes a whole step of a gradient that is a rounding error, so means are compared."""
    left = (1 - RATE * config.optimizer.weight_decay) ** STEPS
    for name, value in ours.items():
        moved = (value - before[name]).abs().mean()
        if any(fnmatchcase(name, pattern) for pattern in case.still):
            assert moved == 0, name
        elif any(fnmatchcase(name, pattern) for pattern in case.decayed):
            decays = value.ndim > 1 and not name.endswith("table")
            torch.testing.assert_close(
                value, before[name] * (left if decays else 1.0), atol=0, rtol=5e-7
            )
            assert decays == bool(moved), name
        else:
            assert moved > RATE / 2, name
            assert (value - theirs[name]).abs().mean() < 0.02 * moved, name
