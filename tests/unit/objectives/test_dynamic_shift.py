"""Shift by tokens, levels of the pipelines and scheduler_config.json, against Diffusers' own."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift as of_flux
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift as of_qwen

from dit.batch import ReferenceGrids
from dit.config import (
    FlowConfig,
    LevelSpacing,
    ObjectiveConfig,
    Problems,
    SamplingLevels,
    TimeShift,
)
from dit.config_loading import ConfigError, load_config
from dit.convert.diffusers_config import objective_config, scheduler_config
from dit.convert.errors import ConvertError
from dit.objectives.diffusers_schedulers import FlowScheduler
from dit.objectives.registry import sampling_path, training_objective
from dit.objectives.training_target import training_problem
from dit.sampling.experts import boundary_of
from tests.packs import run_config

FLUX = {
    **{"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096},
    **{"use_dynamic_shifting": True, "shift": 3.0},
}
# As Qwen-Image publishes it; `shift_terminal` is what the others lack.
QWEN = {
    **{"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192},
    **{"use_dynamic_shifting": True, "shift": 1.0, "shift_terminal": 0.02},
}
SCHEDULERS = {
    "flux": FLUX,
    "qwen": QWEN,
    "linear": FLUX | {"time_shift_type": "linear", "shift": 1.0},
    "constant": {"shift": 3.0},
    "constant-terminal": {"shift": 3.0, "shift_terminal": 0.1},
    "beta": {"shift": 3.0, "use_beta_sigmas": True},  # as Chroma1-Base
    "karras": FLUX | {"use_karras_sigmas": True},
    "exponential": QWEN | {"use_exponential_sigmas": True},
    "beta by tokens": QWEN | {"use_beta_sigmas": True},
}
SIZES = (16, 256, 1024, 4096, 16_384)


def scheduler_file(options: dict[str, Any]) -> dict[str, Any]:
    """scheduler_config.json as Diffusers writes it, with all fields."""
    return dict(FlowMatchEulerDiscreteScheduler(**options).config) | {
        "_class_name": "FlowMatchEulerDiscreteScheduler"
    }


def read(options: dict[str, Any], **flow: Any) -> ObjectiveConfig:
    found = objective_config(scheduler_file(options), place="here").objective
    return replace(found, **flow)


def mu_of(scheduler: FlowMatchEulerDiscreteScheduler, tokens: int) -> float:
    """As the pipelines compute it from their scheduler's configuration."""
    c = scheduler.config
    line = (c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    assert of_flux(tokens, *line) == of_qwen(tokens, *line)
    return of_flux(tokens, *line)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("levels", [SamplingLevels.LINEAR, SamplingLevels.EVEN])
@pytest.mark.parametrize("num_steps", [2, 5, 28])
def test_levels_are_those_of_diffusers_scheduler(name, levels, num_steps) -> None:
    """On its own, and with the `sigmas` that pipelines hand over; sizes mixed in one pack."""
    ours = sampling_path(read(SCHEDULERS[name], sampling_levels=levels))
    level_SN = ours.schedule(SIZES, num_steps=num_steps)
    for column, tokens in enumerate(SIZES):
        scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULERS[name])
        mu = mu_of(scheduler, tokens) if scheduler.config.use_dynamic_shifting else None
        if levels is SamplingLevels.EVEN:
            sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
            scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        else:
            scheduler.set_timesteps(num_steps, mu=mu)
        assert len(scheduler.sigmas) == len(level_SN) == num_steps + 1
        found_S = level_SN[:, column].float()
        torch.testing.assert_close(found_S, scheduler.sigmas, rtol=0, atol=5e-7)
        told_S = ours.network_level(level_SN[:-1, column]).float()
        torch.testing.assert_close(told_S, scheduler.timesteps, rtol=0, atol=5e-4)


def test_even_levels_are_those_of_hunyuan_videos_pipelines() -> None:
    """They write the same list as linspace(1, 0, n + 1)[:-1]."""
    path = sampling_path(read({"shift": 7.0}, sampling_levels=SamplingLevels.EVEN))
    for steps in (1, 4, 50):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        level_S = path.schedule((64,), num_steps=steps)[:, 0].float()
        torch.testing.assert_close(level_S, scheduler.sigmas, rtol=0, atol=5e-7)


@pytest.mark.parametrize("num_steps", [1, 4, 28, 50])
def test_empirical_levels_are_those_of_flux2s_pipelines(num_steps) -> None:
    """Whatever shift training has; the law changes where a picture has more than 4,300 tokens."""
    tokens, sigmas = (24, 1024, 4096, 4300, 4301, 9216), np.linspace(1.0, 1 / num_steps, num_steps)
    for options in (FLUX, {"shift": 1.0}, FLUX | {"use_beta_sigmas": True}):
        path = sampling_path(read(options, sampling_levels=SamplingLevels.EMPIRICAL))
        level_SN = path.schedule(tokens, num_steps=num_steps)
        for column, count in enumerate(tokens):
            written = FlowMatchEulerDiscreteScheduler.from_config(scheduler_config(path.config))
            written.set_timesteps(sigmas=sigmas, mu=compute_empirical_mu(count, num_steps))
            if num_steps == 1 and written.config.use_beta_sigmas:
                continue  # Diffusers divides by none of the steps between
            found_S = level_SN[:, column].float()
            torch.testing.assert_close(found_S, written.sigmas, rtol=0, atol=5e-7)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_constant_shift_of_training_beside_empirical_levels_is_kept(shift) -> None:
    """In a file whose shift is dynamic, as the pipelines need it: as a line without a slope."""
    config = ObjectiveConfig(
        name="flow", flow_shift=shift, sampling_levels=SamplingLevels.EMPIRICAL
    )
    written, of_family = scheduler_config(config), {"sampling_levels": "empirical"}
    assert written["use_dynamic_shifting"] and written["time_shift_type"] == "exponential"
    found = objective_config(written, place="here", of_family=of_family).objective
    assert found.sampling_levels is SamplingLevels.EMPIRICAL
    quantile_N, tokens = torch.tensor([0.1, 0.5, 0.9]), (64, 1024, 9216)
    expected_N = training_objective(config).levels(quantile_N, tokens)
    torch.testing.assert_close(training_objective(found).levels(quantile_N, tokens), expected_N)
    linear = replace(found, time_shift_type=TimeShift.LINEAR, base_shift=0.5, max_shift=1.15)
    with pytest.raises(ConvertError, match=r"objective\.time_shift_type=linear: .*cannot express"):
        scheduler_config(linear)


def test_one_step_has_nothing_to_stretch() -> None:
    for spacing in (None, *LevelSpacing):
        options = {"sampling_levels": SamplingLevels.EVEN, "level_spacing": spacing}
        path = sampling_path(read(QWEN, **options))
        assert path.schedule((256,), num_steps=1).tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("kind", TimeShift)
def test_training_levels_follow_the_tokens_of_each_sample(kind) -> None:
    """Uniform quantiles, shifted by `time_shift` of Diffusers' scheduler for each sample."""
    line = {"base_shift": 0.4, "max_shift": 1.3, "base_image_seq_len": 100}
    options = {**line, "max_image_seq_len": 3000, "time_shift_type": kind.value}
    scheduler = FlowMatchEulerDiscreteScheduler(**options, use_dynamic_shifting=True)
    density = {"density": "logit_normal", "logit_std": 0.7}
    quantile_N = torch.tensor([0.1, 0.5, 0.5, 0.9], dtype=torch.float64)
    tokens = (64, 64, 4096, 512)
    plain = ObjectiveConfig(name="flow", **density)
    before_N = training_objective(plain).levels(quantile_N, tokens)
    shifted = replace(plain, **line, max_image_seq_len=3000, time_shift_type=kind)
    found_N = training_objective(shifted).levels(quantile_N, tokens)
    for t, count, found in zip(before_N.tolist(), tokens, found_N, strict=True):
        expected = scheduler.time_shift(mu_of(scheduler, count), 1.0, torch.tensor(t))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert found_N[2] > found_N[1] + 0.05


def test_neither_references_nor_text_are_counted(make_pack) -> None:
    """One number of target tokens, with and without a reference: one level, of the pack's own."""
    config = ObjectiveConfig(name="flow", text_dropout=0.0, time_shift_type=TimeShift.EXPONENTIAL)
    objective = training_objective(config)
    batch = make_pack([(1, 8, 8), (1, 4, 4)])

    def levels(pack):
        _, problem = training_problem(objective, pack, seed=1, step=2, null={}, options=config)
        return problem.noise_N

    plain_N = levels(batch)
    # The first 64 tokens read as a target of 4 x 8 with a reference of 4 x 8.
    split = replace(batch, grids=((1, 4, 8), (1, 4, 4)))
    split_N = levels(split.with_method(ReferenceGrids(of=(((1, 4, 8),), ()))))
    alone_N = levels(make_pack([(1, 4, 8), (1, 4, 4)], texts=[50, 9]))
    assert torch.equal(split_N, alone_N)
    assert split_N[0] < plain_N[0] and split_N[1] == plain_N[1]


FIELDS: dict[str, Any] = {
    "num_train_timesteps": 500,
    "shift": 2.5,
    "use_dynamic_shifting": True,
    "base_shift": 0.7,
    "max_shift": 1.4,
    "base_image_seq_len": 128,
    "max_image_seq_len": 2048,
    "invert_sigmas": True,
    "shift_terminal": 0.3,
    "use_karras_sigmas": True,
    "use_exponential_sigmas": True,
    "use_beta_sigmas": True,
    "time_shift_type": "linear",
    "stochastic_sampling": True,
}
REFUSED = ("num_train_timesteps", "invert_sigmas", "stochastic_sampling")


def test_every_field_of_the_scheduler_is_known() -> None:
    theirs = set(inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters) - {"self"}
    assert theirs == set(FIELDS) == set(FlowScheduler.model_fields)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_used_or_refused_by_name(field) -> None:
    """Another value moves our levels, or the file is refused."""
    dynamic = {} if field == "shift" else {"use_dynamic_shifting": field != "use_dynamic_shifting"}
    options = {"shift": 1.0, **dynamic}
    changed = scheduler_file(options) | {field: FIELDS[field]}
    if field in REFUSED:
        with pytest.raises(ConvertError, match=f"its {field}="):
            objective_config(changed, place="here")
        told = objective_config(changed, place="here", given=["objective.name=flow"])
        assert told.objective.name == "flow"
        return
    before, after = (
        sampling_path(objective_config(one, place="here").objective).schedule((900,), num_steps=4)
        for one in (scheduler_file(options), changed)
    )
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize("spacing", LevelSpacing)
def test_what_is_trained_with_a_spacing_is_said_and_unchanged(spacing) -> None:
    """It is of samplers alone; training draws the levels that it draws without."""
    plain, spaced = (
        objective_config(scheduler_file({"shift": 3.0} | more), place="here")
        for more in ({}, {f"use_{spacing}_sigmas": True})
    )
    assert spaced.objective.level_spacing is spacing
    assert f"use_{spacing}_sigmas spaces the levels of samplers" in spaced.note
    assert "training draws t by objective.density" in spaced.note
    assert f"{spacing} levels of samplers" in spaced.objective.summary
    quantile_N = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    one, other = (
        training_objective(o.objective).levels(quantile_N, (64,) * 9) for o in (plain, spaced)
    )
    assert torch.equal(one, other)


def test_two_spacings_contradict_each_other() -> None:
    content = scheduler_file({}) | {"use_karras_sigmas": True, "use_beta_sigmas": True}
    with pytest.raises(ConvertError, match="its use_karras_sigmas and use_beta_sigmas contradict"):
        objective_config(content, place="here")


def test_steps_that_no_sampler_here_has_leave_the_rest_of_the_file() -> None:
    content = scheduler_file({"shift": 5.0, "stochastic_sampling": True})
    found = objective_config(content, place="here", given=["objective.name=flow"])
    assert found.objective.flow_shift == 5 and "stochastic_sampling=true" in found.note


def test_a_law_without_numbers_is_refused() -> None:
    content = scheduler_file(FLUX) | {"max_shift": None}
    with pytest.raises(ConvertError, match="needs max_shift, which is null"):
        objective_config(content, place="here")
    constant = scheduler_file({"shift": 2.0}) | {"max_shift": None, "shift_terminal": 0}
    flow = objective_config(constant, place="here").objective
    assert (flow.flow_shift, flow.shift_terminal) == (2.0, None)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_read_is_written(name) -> None:
    config = read(SCHEDULERS[name])
    written = scheduler_config(config)
    assert objective_config(written, place="here").objective == config
    theirs = FlowMatchEulerDiscreteScheduler.from_config(written)
    unread = {"shift"} if theirs.config.use_dynamic_shifting else set()
    for key, value in SCHEDULERS[name].items():
        assert key in unread or theirs.config[key] == value
    even = replace(config, sampling_levels=SamplingLevels.EVEN)
    assert scheduler_config(even) == written


def test_a_family_says_that_its_pipelines_step_evenly() -> None:
    def levels(of_family: dict[str, Any], *given: str) -> str:
        found = objective_config(
            scheduler_file(FLUX), place="here", of_family=of_family, given=given
        )
        assert found.objective.time_shift_type is TimeShift.EXPONENTIAL
        return found.objective.sampling_levels

    assert levels({"name": "flow"}) == "linear"
    assert levels({"name": "flow", "sampling_levels": "even"}) == "even"
    assert levels({"name": "flow", "sampling_levels": "empirical"}) == "empirical"
    assert levels({"sampling_levels": "even"}, "objective.sampling_levels=linear") == "linear"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flow_shift": 3.0}, "flow_shift=3 has no effect with time_shift_type=exponential"),
        ({"shift_base_tokens": 64}, "shift_base_tokens=64 and time_shift_type=exponential are two"),
        (
            {"sampling_levels": SamplingLevels.KARRAS},
            "time_shift_type=exponential does not go with sampling_levels=karras; set",
        ),
        ({"base_image_seq_len": 4096}, "base_image_seq_len=4096 must be below max_image_seq_len"),
        ({"base_image_seq_len": 0}, "base_image_seq_len=0 must be at least 1"),
        ({"base_shift": math.nan}, "base_shift=nan must lie in"),
        (
            {"time_shift_type": TimeShift.LINEAR, "base_shift": 0.01},
            r"base_shift=0\.01 and max_shift=1\.15 make mu -0\.0657\d* for one token",
        ),
        (
            {"time_shift_type": TimeShift.LINEAR, "max_shift": 0.3},
            "time_shift_type=linear shifts by mu itself",
        ),
        ({"shift_terminal": 1.0}, "shift_terminal=1.0 must be above 0 and below 1"),
        (
            {"time_shift_type": None, "shift_terminal": 0.02, "sampling_levels": "unipc"},
            "shift_terminal=0.02 needs sampling_levels=linear or even",
        ),
        (
            {
                "time_shift_type": None,
                "level_spacing": LevelSpacing.BETA,
                "sampling_levels": "unipc",
            },
            "level_spacing=beta respaces sampling_levels=linear or even, and not unipc",
        ),
        ({"sampling_timesteps": ()}, r"sampling_timesteps=\[\] must be falling timesteps above 0"),
        ({"sampling_timesteps": (1000.0, 0.0)}, "must be falling timesteps above 0"),
        ({"sampling_timesteps": (1001.0, 5.0)}, "the first at most timestep_scale=1000"),
        (
            {"sampling_timesteps": (1000.0, 500.0), "shift_terminal": 0.1},
            r"shift_terminal=0\.1 has no effect on sampling_timesteps=\[1000\.0, 500\.0\]",
        ),
        (
            {
                "time_shift_type": None,
                "sampling_timesteps": (1000.0,),
                "sampling_levels": "unipc",
            },
            "takes the place of sampling_levels=linear, even or linear_quadratic, and not of unipc",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options, message) -> None:
    if isinstance(options.get("sampling_levels"), str):
        options = {**options, "sampling_levels": SamplingLevels(options["sampling_levels"])}
    with pytest.raises(Problems, match=message):
        FlowConfig(**{"time_shift_type": TimeShift.EXPONENTIAL, **options})


def test_the_summary_says_the_law() -> None:
    config = FlowConfig(time_shift_type=TimeShift.EXPONENTIAL, max_shift=0.9)
    assert "shift exponential in mu = 0.5 at 256 tokens to 0.9 at 4096" in config.summary_of_flow


@pytest.mark.parametrize("key", ["time_shift_type", "max_shift", "shift_terminal", "level_spacing"])
def test_two_experts_have_one_law(key) -> None:
    other = {"time_shift_type": None, "max_shift": 2.0, "shift_terminal": 0.1}
    other["level_spacing"] = LevelSpacing.BETA
    law = {"time_shift_type": TimeShift.EXPONENTIAL}

    def run(level_range, **options):
        flow = {"level_range": level_range, **law, **options}
        return run_config(objective=ObjectiveConfig(name="flow", **flow))

    with pytest.raises(Problems, match=rf"objective\.{key}="):
        boundary_of(run((0.9, 1.0)), run((0.0, 0.9), **{key: other[key]}))


def test_samples_of_a_validation_have_as_many_steps_as_timesteps_are_listed() -> None:
    words = ["objective.name=flow", "objective.sampling_timesteps=[1000, 500]"]
    load_config(run_config(), overrides=words)
    words += ["validation.num_captions=1"]
    message = r"sampling_steps=35: .* has 2 timesteps, .*; set validation\.sampling_steps=2"
    with pytest.raises(ConfigError, match=message):
        load_config(run_config(), overrides=words)
    load_config(run_config(), overrides=[*words, "validation.sampling_steps=2"])
