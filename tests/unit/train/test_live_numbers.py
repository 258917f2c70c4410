"""Keys that may change at a resume: each of these changes the next step, or what is sampled."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dit.checkpoint_paths import saved_config
from dit.config import RunConfig
from dit.config_loading import load_config
from dit.distributed.model_parallel import FullForward
from dit.models.wan.family import WanConfig
from dit.sampling.generate import Request, generate_latents
from dit.sampling.validation.samples import settings_of
from dit.train.checkpoint import state_dict
from dit.train.model_and_optimizer import ModelAndOptimizer
from tests.families.wan import CONDITIONS
from tests.learning import tiny_run
from tests.resuming import STEPS, resumed, saved_run, step

SETTINGS = ("train.train_iters=9", "optimizer.lr=1e-2", "optimizer.weight_decay=0.1")
FLOW = ("objective.name=flow",)
BASES: dict[str, tuple[str, ...]] = {
    "edm": (),
    "flow": FLOW,
    "mode": (*FLOW, "objective.density=mode"),
    "shift by tokens": (*FLOW, "objective.time_shift_type=exponential"),
    "stretched": (
        *(*FLOW, "objective.time_shift_type=exponential"),
        "objective.density=stretched_logit_normal",
    ),
    "constant average": ("ema.kind=constant", "ema.decay=0.9"),
    "route": (*FLOW, "model.num_layers=4", "model.route_from=1", "model.route_to=2"),
    "muon": ("optimizer.kind=muon",),
    "adapters": ("lora.rank=2",),
    "frames": FLOW,
    "pictures": FLOW,
    "cubes": (
        *(*FLOW, "model.sparse_attention=true", "model.sparse_share=0.3"),
        *("model.sparse_share_step=0.2", "model.sparse_share_interval=1"),
    ),
}
WAN = {"frames": "ti2v", "pictures": "i2v", "cubes": "t2v"}
WEIGHTS: dict[str, tuple[str, ...]] = {
    "edm": (
        *("objective.p_mean=1", "objective.p_std=2", "objective.loss_mean=sample"),
        *("objective.text_dropout=0.9", "optimizer.lr=2e-2", "optimizer.min_lr=5e-3"),
        *("optimizer.weight_decay=0.5", "optimizer.adam_beta1=0.5", "optimizer.adam_beta2=0.5"),
        *("optimizer.adam_eps=1", "optimizer.clip_grad=1e-3", "scheduler.lr_decay_style=linear"),
        *("scheduler.lr_warmup_iters=6", "scheduler.lr_decay_iters=20", "model.precision=bf16"),
    ),
    "flow": (
        *("objective.density=uniform", "objective.logit_mean=1", "objective.logit_std=0.5"),
        *("objective.flow_shift=3", "objective.shift_base_tokens=4", "objective.weighting=linear"),
        "objective.time_shift_type=linear",
    ),
    "mode": ("objective.mode_scale=0.5",),
    "stretched": ("objective.uniform_share=1",),
    "shift by tokens": (
        *("objective.base_shift=0.1", "objective.max_shift=2"),
        *("objective.base_image_seq_len=16", "objective.max_image_seq_len=512"),
    ),
    "muon": (
        *("optimizer.muon_momentum=0.5", "optimizer.muon_nesterov=false"),
        *("optimizer.muon_coefficients=simple", "optimizer.muon_steps=3"),
        "optimizer.muon_period=3",
    ),
    "route": ("model.route_from=2", "model.route_to=3", "model.route_rate=0.75"),
    "adapters": ("lora.dropout=0.5", "lora.dtype=bf16", "lora.base_dtype=float8_e4m3"),
    "frames": ("objective.image_condition_probability=0", "objective.given_frames=[0, 0, 1]"),
    "pictures": ("objective.image_dropout=1",),
    "cubes": (
        *("model.sparse_share=0.8", "model.sparse_share_step=0.3"),
        "model.sparse_share_interval=3",
    ),
}
"""What changes the weights after the next step."""
AVERAGES = {
    "edm": ("ema.kind=constant", "ema.sigma_rel=0.2"),
    "constant average": ("ema.decay=0.5",),
}
"""What changes the averages of the weights alone."""
SAMPLES = {
    "edm": (
        *("objective.sigma_min=0.1", "objective.sigma_max=20", "objective.rho=3"),
        *("validation.sampler=euler", "validation.sampling_steps=2", "validation.guidance=4"),
    ),
    "flow": (
        "objective.sampling_levels=even",
        "objective.sampling_timesteps=[1000, 900, 500, 100]",
        "objective.shift_terminal=0.3",
        "objective.level_spacing=karras",
    ),
}
"""What changes the samples of a validation."""


def _config(base: str) -> RunConfig:
    start = tiny_run(num_layers=1)
    if base in WAN:
        model = WanConfig(**CONDITIONS[WAN[base]] | {"num_layers": 1})
        start = RunConfig(model=model, dataset=start.dataset)
    return load_config(start, overrides=[*SETTINGS, *BASES[base]])


def _after(place: Path, config: RunConfig, groups) -> tuple[Tensor, Tensor]:
    """Weights and averages of the step after a resume."""
    model = resumed(place, config, groups)
    step(model, config, STEPS + 1)
    assert model.ema is not None
    shards = [[shard.value for shard in model.ema.shards], model.ema.averages]
    weights, averages = (torch.cat([one.flatten() for one in every]) for every in shards)
    return weights, averages


@pytest.mark.parametrize("base", BASES)
def test_the_next_step_is_one_of_the_new_settings(groups, tmp_path, monkeypatch, base):
    monkeypatch.setattr(state_dict, "saved_config", cache(saved_config))
    config = _config(base)
    place = saved_run(tmp_path, config, groups)
    weights, averages = _after(place, config, groups)
    for token in WEIGHTS.get(base, ()):
        changed, _ = _after(place, load_config(config, overrides=[token]), groups)
        assert (changed - weights).abs().max() > 1e-6, token
    for token in AVERAGES.get(base, ()):
        same, changed = _after(place, load_config(config, overrides=[token]), groups)
        assert torch.equal(same, weights) and not torch.equal(changed, averages), token


def _samples(model: ModelAndOptimizer, config: RunConfig) -> Tensor:
    width = config.model.crossattn_emb_size
    request = Request(
        inputs={"text": torch.ones(2, width)},
        negative={"text": torch.zeros(1, width)},
        latent_FHW=(1, 4, 4),
        fps=math.nan,
        seed=0,
    )
    settings = settings_of(config)
    return generate_latents(
        FullForward(model.chunks).eval(), [request], config=config, settings=settings
    )[0]


@pytest.mark.parametrize("base", SAMPLES)
def test_samples_of_a_validation_are_those_of_the_new_settings(groups, tmp_path, base):
    config = load_config(_config(base), overrides=["validation.sampling_steps=4"])
    place = saved_run(tmp_path, config, groups)
    model = resumed(place, config, groups)
    samples = _samples(model, config)
    for token in SAMPLES[base]:
        changed = _samples(model, load_config(config, overrides=[token]))
        assert (changed - samples).abs().max() > 1e-4, token
