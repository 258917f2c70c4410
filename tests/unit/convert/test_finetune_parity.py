"""Fine-tuning from a Diffusers folder is the loop that one writes with Diffusers and torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.batch import LatentSample, PackedBatch, Problem
from dit.config import RunConfig
from dit.config.loading import load_config
from dit.convert.load_hf.start import hf_start
from dit.models.family import diffusers_form
from dit.objectives import training_objective, training_problem
from dit.sampling.unpatchify import unpack_latents
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.step import forward_backward, optimizer_step
from recipes.runs import dit_debug, for_weights
from tests.packs import random_pack
from tests.published import publish, random_model
from tests.wan_networks import publish_wan, random_wan

STEPS, RATE = 5, 1e-5
GRIDS, CAPTIONS = [(1, 3, 5), (3, 2, 3), (2, 4, 1)], [7, 1, 11]
KINDS = {
    "wan": lambda folder: publish_wan(folder, random_wan()),
    "cosmos": lambda folder: publish(folder, random_model(extra_pos_embed_type="learnable")),
}
SETTINGS = (
    *("checkpoint.save=null", "model.precision=fp32", "model.text_pad_to=12"),
    *("objective.text_dropout=0", f"optimizer.lr={RATE}", "scheduler.lr_decay_style=constant"),
    *("dataset.mock=false", "ema.kind=none"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_diffusers_and_torch(groups, tmp_path, resize, kind):
    folder = KINDS[kind](tmp_path / "hf")
    words = (*SETTINGS, f"checkpoint.load_hf={folder}")
    config = load_config(dit_debug(), overrides=words, adapt=for_weights)
    start = hf_start(config)
    assert start is not None
    model = build_model_and_optimizer(config, groups, fill=start.fill)
    before = _values(model)
    theirs = diffusers_form(config.model).open_network(folder).train()
    adamw = _adamw(theirs, config)
    losses = []
    for step in range(1, STEPS + 1):
        item = _problem(config, step)
        ours = forward_backward(model, [item], config=config)
        optimizer_step(model, config=config, number=step, loss=ours.total)
        adamw.zero_grad()
        loss = _loss(theirs, *item, config)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), config.optimizer.clip_grad)
        adamw.step()
        losses.append((ours.total / ours.count, loss.item()))
    assert all(abs(a - b) < 1e-5 * b for a, b in losses), losses
    theirs.save_pretrained(tmp_path / "after")
    _assert_moved_alike(before, _values(model), _loaded(config, groups, tmp_path / "after"))


def _problem(config: RunConfig, step: int) -> tuple[PackedBatch, Problem]:
    """The same samples at each step, with noise and levels of their own."""
    pack = random_pack(GRIDS, CAPTIONS, model=config.model, fps=[math.nan, 16.0, 30.0])
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


def _loss(network: nn.Module, batch: PackedBatch, problem: Problem, config: RunConfig) -> Tensor:
    """Mean over all tokens of the pack, one sample after the other."""
    model, form = config.model, diffusers_form(config.model)
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    fed = unpack_latents(problem.input_TC, batch, **patch)
    wanted = unpack_latents(problem.target_TC, batch, **patch)
    offsets, rows = batch.text_offsets["text"], batch.texts["text"].float()
    total: Any = 0.0
    for i, (latent, target) in enumerate(zip(fed, wanted, strict=True)):
        caption = rows[offsets[i] : offsets[i + 1]][: CAPTIONS[i]]
        fps = float(batch.fps_N[i])
        sample = LatentSample(key=str(i), latent_CFHW=latent, text_LE=caption, fps=fps)
        made = form.run_network(network, sample, float(problem.level_M[i]), config)
        error = (made - target).square().mean()
        total = total + problem.weight_N[i] * error * math.prod(batch.grids[i])
    return total / sum(map(math.prod, batch.grids))


def _values(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.chunks[0].module.named_parameters()}


def _loaded(config: RunConfig, groups: Any, folder: Path) -> dict[str, Tensor]:
    words = (*SETTINGS, f"checkpoint.load_hf={folder}")
    start = hf_start(load_config(dit_debug(), overrides=words, adapt=for_weights))
    assert start is not None
    return _values(build_model_and_optimizer(config, groups, fill=start.fill))


def _assert_moved_alike(
    before: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> None:
    """Adam makes a whole step of a gradient that is a rounding error, so means are compared."""
    for name, value in ours.items():
        moved = (value - before[name]).abs().mean()
        assert moved > RATE, name
        assert (value - theirs[name]).abs().mean() < 0.02 * moved, name
