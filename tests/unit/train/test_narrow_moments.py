"""Adam's moments in fewer bits: what Transformer Engine is asked for, in whose place a stand-in is.

The real FusedAdam has run in no test.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dit.config import DdpConfig, MomentType, OptimizerConfig, Precision, Problems, RunConfig
from dit.config_loading import load_config
from dit.sizing.memory import memory, parameter_count
from dit.train.checkpoint.async_save import save_checkpoint
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.step import optimizer_step
from tests.families.wan import wan_model
from tests.packs import run_config
from tests.unit.train.test_checkpoint import DATA

NARROW = [MomentType.BF16, MomentType.FP16, MomentType.FP8]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def _config(kind: MomentType, **model) -> RunConfig:
    options = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}
    moments = {"exp_avg_dtype": kind, "exp_avg_sq_dtype": kind}
    return RunConfig(model=wan_model(**model), optimizer=OptimizerConfig(**options, **moments))


def _built(config: RunConfig, groups, seed: int = 2):
    return build_model_and_optimizer(config, groups, fill=partial(randomise, seed=seed))


def _step(model, config: RunConfig, number: int) -> None:
    """A step in which the last matrix has no gradient at all, so that it only decays."""
    weights = [*model.chunks[0].module.parameters()]
    for p in weights:
        p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    [p for p in weights if p.ndim > 1][-1].main_grad.zero_()
    optimizer_step(model, config=config, number=number, loss=1.0)


def _main(model) -> list[torch.Tensor]:
    return [shard.value for shard in model.ema.shards]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("kind", NARROW)
def test_steps_are_those_of_float32_to_the_types_precision(groups, engine, kind, precision):
    wide = _config(MomentType.FP32, precision=precision)
    narrow = _config(kind, precision=precision)
    models = [_built(config, groups) for config in (wide, narrow)]
    start = [value.clone() for value in _main(models[0])]
    for number in range(1, 4):
        for model, config in zip(models, (wide, narrow), strict=True):
            _step(model, config, number)
    for inner in models[1].optimizer.chained_optimizers:
        states = inner.optimizer.state.values()
        assert {t.dtype for state in states for t in state.values()} == {TYPES[kind]}
    tolerance = 0.2 if kind is MomentType.FP8 else 0.02
    for before, ours, theirs in zip(start, *map(_main, models), strict=True):
        assert theirs.dtype == torch.float32 and theirs.isfinite().all()
        moved = (ours - before).norm()
        assert moved > 0 and (theirs - ours).norm() <= tolerance * moved


@pytest.mark.parametrize("kind", NARROW)
def test_a_resume_has_the_moments_and_bfloat16_every_bit(groups, engine, tmp_path, kind):
    config = _config(kind)
    whole = _built(config, groups)
    _step(whole, config, 1)
    place = save_checkpoint(
        tmp_path, whole, progress=TrainProgress(step=1), config=config, data=DATA
    )
    again = _built(config, groups, seed=3)
    load_checkpoint(place, again, config=config)
    for model in (whole, again):
        _step(model, config, 2)
    for ours, theirs in zip(_main(whole), _main(again), strict=True):
        assert torch.equal(ours, theirs) or kind is not MomentType.BF16
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", NARROW)
def test_other_moments_go_on_with_a_checkpoint(groups, engine, tmp_path, kind):
    """Stored moments are float32, so that the type may change."""
    wide, narrow = _config(MomentType.FP32), _config(kind)
    first = _built(narrow, groups)
    _step(first, narrow, 1)
    place = save_checkpoint(
        tmp_path, first, progress=TrainProgress(step=1), config=narrow, data=DATA
    )
    for config in (wide, narrow):
        model = _built(config, groups, seed=3)
        load_checkpoint(place, model, config=config)
        _step(model, config, 2)
        assert all(value.isfinite().all() for value in _main(model))


def test_without_it_the_error_names_it_and_the_keys(groups):
    with pytest.raises(ValueError, match=r"optimizer\.exp_avg_dtype=bf16 .* Transformer Engine"):
        _built(_config(MomentType.BF16), groups)


def test_what_it_does_not_go_with_is_refused():
    config = _config(MomentType.BF16)
    with pytest.raises(Problems, match="optimizer_cpu_offload"):
        replace(config.optimizer, optimizer_cpu_offload=True)
    with pytest.raises(Problems, match=r"set ddp\.use_distributed_optimizer=true"):
        replace(config, ddp=DdpConfig(use_distributed_optimizer=False))


@pytest.mark.parametrize(
    ("written", "kind"),
    [("bf16", "bf16"), ("torch.bfloat16", "bf16"), ("uint8", "fp8"), ("float16", "fp16")],
)
def test_names_of_torch_are_read(written, kind):
    overrides = [f"optimizer.exp_avg_sq_dtype={written}"]
    assert load_config(run_config(), overrides=overrides).optimizer.exp_avg_sq_dtype == kind


def test_the_estimate_counts_them():
    config, narrow = run_config(), {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"}
    changes = [f"optimizer.{key}={value}" for key, value in narrow.items()]
    less = load_config(config, overrides=changes)
    count = parameter_count(config.model)
    assert memory(config, world_size=1).optimizer == (4 + 4 + 4) * count
    assert memory(less, world_size=1).optimizer == (4 + 1 + 2) * count
