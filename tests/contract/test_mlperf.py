"""Five steps of conf/mlperf_flux1.yaml, cut small, are those of a loop with Diffusers' FLUX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dit.config_loading import load_config
from dit.convert.load_hf.start import hf_start
from dit.data.pack import pack_samples
from dit.models.patch_layout import PatchLayout
from dit.objectives.noise import draw_noise
from dit.objectives.pack_draws import CPU, Draw, dropped_captions, pack_rng
from dit.objectives.registry import training_objective
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.training_target import training_problem
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.optimizer.update import learning_rate
from dit.train.step import forward_backward, optimizer_step
from recipes.runs import dit_debug, dit_xl, for_weights
from tests.families.flux import random_flux
from tests.packs import random_samples

CONF = Path(__file__).parents[2] / "conf/mlperf_flux1.yaml"
STEPS, SAMPLES, SIDE, TEXT = 5, 8, 4, 6  # side in patches


def _config(folder: Path) -> Any:
    words = ("checkpoint.save=null", "model.precision=fp32", "dataset.mock=false", "ema.kind=none")
    words += (f"checkpoint.load_hf={folder}", "objective.name=flow")
    small = load_config(dit_debug(), overrides=words, adapt=for_weights)
    whole = load_config(dit_xl(), config_file=CONF)
    warm_up = replace(whole.scheduler, lr_warmup_iters=2)
    return replace(small, objective=whole.objective, optimizer=whole.optimizer, scheduler=warm_up)


def _adamw(network: nn.Module) -> torch.optim.AdamW:
    """No weight decay on biases and norms."""
    matrices = [p for p in network.parameters() if p.ndim > 1]
    plain = [p for p in network.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def _plain_loss(
    network: nn.Module, rows: Tensor, noise: Tensor, t: Tensor, text: Tensor, pooled: Tensor
) -> Tensor:
    """Mean squared error of the velocity; all samples have one form, [B, tokens, numbers]."""
    mixed = (1 - t)[:, None, None] * rows + t[:, None, None] * noise
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(SIDE), torch.arange(SIDE)).float()
    made = network(
        mixed,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=t,
        img_ids=ids,
        txt_ids=torch.zeros(TEXT, 3),
        guidance=None,
    ).sample
    return (made - (noise - rows)).square().mean()


def test_losses_are_those_of_a_plain_loop_with_both_texts_dropped_together(
    groups, tmp_path: Path
) -> None:
    random_flux(seed=1, guidance_embeds=False).save_pretrained(tmp_path / "hf")
    config = _config(tmp_path / "hf")
    start = hf_start(config)
    assert start is not None
    model = build_model_and_optimizer(config, groups, fill=start.fill)
    theirs: Any = random_flux(seed=1, guidance_embeds=False).train()
    adamw = _adamw(theirs)
    samples = random_samples([(1, SIDE, SIDE)] * SAMPLES, [TEXT] * SAMPLES, model=config.model)
    width = config.model.crossattn_emb_size
    drawn = torch.Generator().manual_seed(7)
    null = {
        "text": torch.randn(TEXT, width, generator=drawn),
        "pooled_text": torch.randn(config.model.pooled_size, generator=drawn),
    }
    pack = pack_samples(samples, PatchLayout.of(config))
    rows = pack.latent_TC.float().unflatten(0, (SAMPLES, -1))
    objective, losses, dropped_at_all = training_objective(config.objective), [], 0
    for step in range(1, STEPS + 1):
        where = {"seed": 3, "step": step, "pack_id": pack.pack_id, "device": CPU}
        noise = draw_noise(pack, pack_rng(**where)).unflatten(0, (SAMPLES, -1))
        t = draw_quantiles(SAMPLES, pack_rng(**where, draw=Draw.LEVELS)).float()
        dropped = dropped_captions(pack, seed=3, step=step, options=config.objective)
        dropped_at_all += sum(dropped)
        item = training_problem(
            objective, pack, seed=3, step=step, null=null, options=config.objective
        )
        ours = forward_backward(model, [item], objective=config.objective)
        optimizer_step(model, config=config, number=step, loss=ours.total)

        text = pack.text_LE.float().unflatten(0, (SAMPLES, -1)).clone()
        pooled = pack.vectors["pooled_text"].float().clone()
        text[dropped], pooled[dropped] = null["text"], null["pooled_text"]
        for group in adamw.param_groups:
            group["lr"] = learning_rate(config, step)
        adamw.zero_grad()
        loss = _plain_loss(theirs, rows, noise, t, text, pooled)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
        losses.append((ours.total / ours.count, loss.item()))
    assert 0 < dropped_at_all < STEPS * SAMPLES
    assert all(abs(a - b) < 1e-5 * b for a, b in losses), losses
    assert len({b for _, b in losses}) == STEPS
