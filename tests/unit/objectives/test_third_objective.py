"""An objective that is defined here, of the three methods that training needs, and registered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dit.batch import PackedBatch, Problem
from dit.config import OBJECTIVES, CheckpointConfig, Problems, RunConfig, ValidationConfig
from dit.config_loading import ConfigError, load_config, read_config, save_config
from dit.convert.diffusers_config import objective_config
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, check_expressible
from dit.objectives.objective import per_token, real_only
from dit.objectives.registry import REGISTRY, ObjectiveParts, register, training_objective
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sizing.describe import describe
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.trainer import pretrain
from tests.learning import tiny_run, train

NAME = "trigonometric"


class Trigonometric:
    """state = cos(a) * latent + sin(a) * noise; the target is dstate / da (arXiv:2202.00512)."""

    def levels(self, quantile_N: Tensor, num_tokens: Sequence[int], /) -> Tensor:
        assert len(num_tokens) == len(quantile_N)
        return (math.pi / 2 * quantile_N.double()).float()

    def problem_at(self, batch: PackedBatch, noise_N: Tensor, noise_TC: Tensor) -> Problem:
        angle_T1, latent_TC = per_token(noise_N, batch), batch.latent_TC.float()
        state_TC = angle_T1.cos() * latent_TC + angle_T1.sin() * noise_TC
        velocity_TC = angle_T1.cos() * noise_TC - angle_T1.sin() * latent_TC
        return Problem(
            input_TC=real_only(state_TC, batch),
            level_M=self.network_level(noise_N),
            target_TC=real_only(velocity_TC, batch),
            weight_N=torch.ones_like(noise_N),
            noise_N=noise_N,
        )

    def network_level(self, noise_N: Tensor) -> Tensor:
        return noise_N


@pytest.fixture
def config() -> Iterator[RunConfig]:
    parts = ObjectiveParts(training=lambda _: Trigonometric())
    register(NAME, parts, summary=lambda _: "angle ~ U(0, pi / 2)")
    base = tiny_run()
    yield load_config(base, overrides=[f"objective.name={NAME}", "train.global_batch_size=1"])
    del REGISTRY[NAME], OBJECTIVES[NAME]


def test_both_tables_of_objectives_have_the_same_names() -> None:
    assert list(REGISTRY) == list(OBJECTIVES)


def test_a_name_that_is_taken_or_unknown_is_refused(config: RunConfig) -> None:
    with pytest.raises(ValueError, match=f"{NAME} is registered already"):
        register(NAME, REGISTRY[NAME], summary=lambda _: "")
    with pytest.raises(ConfigError, match=f"name=ddpm is not a known .*; use edm, flow, {NAME}"):
        load_config(config, overrides=["objective.name=ddpm"])


def test_it_trains(groups, config: RunConfig) -> None:
    assert isinstance(training_objective(config.objective), Trigonometric)
    learner = build_model_and_optimizer(config, groups)
    losses = [train(learner, config, 1, 1)[0] for _ in range(15)]  # with the same noise each time
    assert losses[-1] < 0.8 * losses[0]


def test_dry_run_and_saved_configuration_have_its_name(config: RunConfig, tmp_path: Path) -> None:
    text = describe(config, world_size=1)
    assert f"  name: {NAME}\n" in text
    assert f"# objective     {NAME}, angle ~ U(0, pi / 2)\n" in text
    save_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config


def test_export_without_a_scheduler_is_refused_by_name(config: RunConfig, tmp_path: Path) -> None:
    refusal = f"objective.name={NAME}: this objective has no Diffusers scheduler; --no-scheduler"
    with pytest.raises(ConvertError, match=refusal):
        check_expressible(config, ExportOptions())
    check_expressible(config, ExportOptions(scheduler=False))


def test_an_import_may_be_told_its_name(config: RunConfig) -> None:
    scheduler = {"_class_name": "DDIMScheduler"}
    with pytest.raises(ConvertError, match=f"or objective.name={NAME}"):
        objective_config(scheduler, place="here")
    found = objective_config(scheduler, place="here", given=[f"objective.name={NAME}"])
    assert found.objective.name == NAME


def test_sampling_without_a_path_is_refused_by_name(groups, config: RunConfig, tmp_path) -> None:
    refusal = f"objective.name={NAME} has no sampling path"
    size = (1, config.model.patch_spatial, config.model.patch_spatial)
    inputs = {"text": torch.zeros(1, config.model.crossattn_emb_size)}
    request = Request(inputs=inputs, negative={}, latent_FHW=size, fps=math.nan, seed=0)
    with pytest.raises(Problems, match=refusal):
        generate_latents(nn.Linear(1, 1), [request], config=config, settings=SamplingSettings())
    # A run that would sample at its validations is refused before it starts.
    asking = replace(
        config,
        validation=ValidationConfig(num_captions=2),
        checkpoint=CheckpointConfig(save=str(tmp_path / "run")),
    )
    with pytest.raises(Problems, match=refusal):
        pretrain(asking)
    assert not (tmp_path / "run").exists()
