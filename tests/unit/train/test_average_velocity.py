"""Distillation by average velocity: Gaussians with known flow maps, and a loop over plain calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.config import (
    DistillConfig,
    DistillMethod,
    FlowPrediction,
    LoraConfig,
    ObjectiveConfig,
    Preference,
    Problems,
    RunConfig,
    Sampler,
    SamplingLevels,
    StudentSampler,
    ValidationConfig,
)
from dit.lora.targets import chosen_adapters
from dit.models.layers.adaptable import adapters_off
from dit.objectives.noise import draw_noise
from dit.objectives.pack_draws import CPU, Draw, pack_rng
from dit.objectives.registry import sampling_path, training_objective
from dit.objectives.trajectory import draw_steps
from dit.sampling.commands.options import GenerationOptions
from dit.train.distill import rollouts as module
from dit.train.distill.average_velocity import average_velocity
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.reference_passes import training_items
from dit.train.step import forward_backward
from tests.learning import tiny_run
from tests.packs import random_pack

FLOW = ObjectiveConfig(name="flow", text_dropout=0.0, sampling_levels=SamplingLevels.EVEN)
GRIDS, TEXTS = [(1, 8, 8), (2, 7, 5), (1, 4, 4), (1, 6, 6)], [5, 2, 1, 3]
NULL = {"text": torch.full((3, 8), 0.7)}


def config_of(objective: ObjectiveConfig = FLOW, *, adapted: bool = True, **c: Any) -> RunConfig:
    more: Any = {"method": DistillMethod.OPD, "teacher_guidance": 1.0}
    more |= {} if adapted else {"teacher": "elsewhere"}
    return replace(
        tiny_run(),
        objective=objective,
        lora=LoraConfig(rank=2) if adapted else LoraConfig(),
        distill=DistillConfig(**(more | c)),
    )


class Gaussian:
    """A teacher of data N(m, Q diag(s²) Q'), and a student that is affine in its state.

    Without a caption the mean is 0.
    """

    def __init__(self, objective: ObjectiveConfig, *, width: int, exact: bool = False, **c: Any):
        config = config_of(objective, adapted=False, **c)
        generator = torch.Generator().manual_seed(1)
        self.std_C = torch.linspace(0.3, 1.5, width, dtype=torch.float64)
        self.mean_C = torch.linspace(-1, 2, width, dtype=torch.float64)
        noise_CC = torch.randn(width, width, generator=generator, dtype=torch.float64)
        self.axes_CC = torch.linalg.qr(noise_CC)[0]
        self.exact, self.student = exact, nn.Identity()
        self.learned: dict[float, Tensor] = {}  # of a level: [C + 1, C], the last row is added
        self.run: Any = SimpleNamespace(
            config=config,
            model=SimpleNamespace(chunks=[self.student]),
            teacher=[nn.Identity()],
            objective=training_objective(objective),
            null=NULL,
        )
        self.pack = random_pack(GRIDS, TEXTS, model=config.model)
        levels = sampling_path(objective).schedule([64], num_steps=config.distill.steps)
        self.levels = levels[:, 0].tolist()

    def velocity(self, state_TC: Tensor, level: float, mean_C: Tensor) -> Tensor:
        """That of the flow at a level, or the mean to the end of the step that begins there."""
        z_TC, m_C, t = state_TC @ self.axes_CC, mean_C @ self.axes_CC, level

        def std(at: float) -> Tensor:
            return ((1 - at) ** 2 * self.std_C**2 + at**2).sqrt()

        if not self.exact:
            rate_C = (t - (1 - t) * self.std_C**2) / std(t) ** 2
            return (rate_C * (z_TC - (1 - t) * m_C) - m_C) @ self.axes_CC.T
        r = next(end for at, end in pairwise(self.levels) if at == pytest.approx(t, abs=1e-6))
        there_TC = (1 - r) * m_C + std(r) / std(t) * (z_TC - (1 - t) * m_C)
        return (there_TC - z_TC) / (r - t) @ self.axes_CC.T

    def answers(self, chunks: Any, items: Any, **_: Any) -> list[Tensor]:
        """In the place of passes through networks."""
        outputs = []
        for batch, problem in items:
            state_TC, out_TC = (
                problem.input_TC.double(),
                torch.zeros_like(problem.input_TC).double(),
            )
            captioned = not torch.equal(batch.text_LE[:1], NULL["text"][:1])
            for sample, told in enumerate(problem.level_M.tolist()):
                rows, level = batch.segment_T == sample, told / 1000
                if chunks[0] is self.student:
                    weights = self.learned.get(round(level, 5))
                    if weights is not None:
                        out_TC[rows] = state_TC[rows] @ weights[:-1] + weights[-1]
                else:
                    mean_C = self.mean_C * captioned
                    out_TC[rows] = self.velocity(state_TC[rows], level, mean_C)
            outputs.append(out_TC.float())
        return outputs

    def learn(self, steps: int) -> None:
        """Fits the student to its targets, exactly, once for each of its steps."""
        for round_ in range(steps):
            found: dict[float, list[tuple[Tensor, Tensor]]] = {}
            for draw in range(8):
                ((batch, problem),), _ = average_velocity(
                    self.run, [self.pack], step=8 * round_ + draw
                )
                for sample, level in enumerate(problem.noise_N.tolist()):
                    rows = (batch.segment_T == sample) & batch.is_target_T
                    pair = problem.input_TC[rows].double(), problem.target_TC[rows].double()
                    found.setdefault(round(level, 5), []).append(pair)
            for level, pairs in found.items():
                input_TC, target_TC = (torch.cat(parts) for parts in zip(*pairs, strict=True))
                ones_T1 = torch.ones(len(input_TC), 1, dtype=torch.float64)
                self.learned[level] = torch.linalg.lstsq(
                    torch.cat([input_TC, ones_T1], 1), target_TC
                ).solution

    def made(self) -> tuple[Tensor, Tensor]:
        """Mean [C] and covariance [C, C] of what the student makes of normal noise."""
        width = len(self.mean_C)
        mean_C, root_CC = torch.zeros(width).double(), torch.eye(width).double()
        for start, end in pairwise(self.levels):
            weights = self.learned[round(start, 5)]
            mean_C = mean_C + (end - start) * (mean_C @ weights[:-1] + weights[-1])
            root_CC = root_CC + (end - start) * root_CC @ weights[:-1]
        return mean_C, root_CC.T @ root_CC


@pytest.fixture
def gaussian(monkeypatch):
    def made(objective: ObjectiveConfig, **c: Any) -> Gaussian:
        found = Gaussian(objective, width=16, **c)
        monkeypatch.setattr(module, "whole_outputs", found.answers)
        return found

    return made


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_exact_flow_of_a_gaussian_is_learned_in_any_number_of_steps(
    steps: int, shift: float, gaussian
) -> None:
    found = gaussian(replace(FLOW, flow_shift=shift), steps=steps, teacher_steps=1, exact=True)
    found.learn(steps)
    mean_C, covariance_CC = found.made()
    torch.testing.assert_close(mean_C, found.mean_C, rtol=0.01, atol=1e-4)
    true_CC = found.axes_CC @ found.std_C.square().diag() @ found.axes_CC.T
    torch.testing.assert_close(covariance_CC, true_CC, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize(
    ("steps", "errors"),
    [(4, (-0.511, -0.083, -0.021)), (8, (-0.295, -0.043, -0.011)), (1, (-1.0, -0.295, -0.083))],
)
def test_steps_of_the_teacher_decide_what_variance_is_lost(
    steps: int, errors: tuple[float, ...], gaussian
) -> None:
    """Of data with deviation 0.6: 1, 8 and 32 steps of the teacher in one of the student."""
    for teacher_steps, error in zip((1, 8, 32), errors, strict=True):
        found = gaussian(FLOW, steps=steps, teacher_steps=teacher_steps)
        found.std_C.fill_(0.6)
        found.learn(steps)
        mean_C, covariance_CC = found.made()
        assert (covariance_CC.diagonal() / 0.36 - 1).tolist() == pytest.approx(
            [error] * 16, abs=6e-4
        )
        torch.testing.assert_close(mean_C, found.mean_C, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction", FlowPrediction)
def test_guidance_moves_the_mean_that_is_learned(prediction: FlowPrediction, gaussian) -> None:
    """Of two Gaussians of one covariance, guidance w is the one of mean m0 + w (m - m0)."""
    found = gaussian(FLOW, steps=2, teacher_steps=1, exact=True, teacher_guidance=3.0)
    found.learn(2)
    mean_C, covariance_CC = found.made()
    torch.testing.assert_close(mean_C, 3 * found.mean_C, rtol=1e-3, atol=1e-3)
    assert covariance_CC.trace() == pytest.approx(found.std_C.square().sum().item(), rel=1e-4)
    # A network that says latents has these as targets, with the scale that makes them velocities.
    said = replace(FLOW, prediction=prediction)
    found.run.objective = training_objective(said)
    found.run.config = replace(found.run.config, objective=said)
    if prediction is FlowPrediction.X:
        found.exact = False
        ((_, problem),), _ = average_velocity(found.run, [found.pack], step=1)
        assert problem.scale_N is not None
        torch.testing.assert_close(problem.scale_N, 1 / problem.noise_N)


def test_each_step_of_the_student_is_drawn_as_often() -> None:
    drawn = draw_steps(30_000, torch.Generator().manual_seed(0), steps=3)
    assert torch.bincount(drawn).tolist() == pytest.approx([10_000] * 3, rel=0.05)


def a_run(groups, objective: ObjectiveConfig, **c: Any) -> tuple[Any, Any, Any]:
    """A run of random adapters beside random weights, its pack, and the network."""
    settings: Any = {"steps": 3, "teacher_steps": 2} | c
    config = config_of(objective, **settings)
    chosen = chosen_adapters(config.model, config.lora)
    built = build_model_and_optimizer(
        config, groups, fill=partial(randomise, seed=3), adapters=chosen
    )
    run = SimpleNamespace(
        config=config,
        model=built,
        objective=training_objective(objective),
        null=NULL,
        teacher=(),
    )
    return run, random_pack(GRIDS, TEXTS, model=config.model), built.chunks[0].module


def test_targets_are_those_of_a_plain_loop_over_diffusers_levels(groups) -> None:
    """Each sample by itself; teacher: adapters off, guidance 2; the step drawn for the sample."""
    objective = replace(FLOW, sampling_levels=SamplingLevels.LINEAR, flow_shift=3.0)
    run, pack, network = a_run(groups, objective, teacher_guidance=2.0)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(3)
    told: Any = {"seed": run.config.rng.seed, "step": 4, "pack_id": pack.pack_id, "device": CPU}
    noise_TC = draw_noise(pack, pack_rng(**told, draw=Draw.NOISE)).double()
    rng = pack_rng(**told, draw=Draw.STUDENT_STEP)
    drawn = (torch.rand(len(GRIDS), generator=rng, dtype=torch.float64) * 3).long().tolist()
    assert len(set(drawn)) > 1  # samples of one pack are at different steps
    nulls = pack.with_text("text", torch.cat([NULL["text"]] * 4), (0, 3, 6, 9, 12))

    def said(batch: Any, state_TC: Tensor, level: float) -> Tensor:
        with torch.no_grad():
            level_N = torch.full((len(GRIDS),), 1000 * level)
            return network.eval()(state_TC.float(), level_N, batch).double()

    ((batch, problem),), references = training_items(run, [pack], step=4)
    assert references is not None and network.training
    for sample, number in enumerate(drawn):
        rows = (pack.segment_T == sample) & pack.is_target_T
        sigmas, state_TC = scheduler.sigmas.double().tolist(), noise_TC
        for start, end in pairwise(sigmas[: number + 1]):
            state_TC = state_TC + (end - start) * said(pack, state_TC, start)
        middle = (sigmas[number] + sigmas[number + 1]) / 2
        end_TC = state_TC
        with adapters_off(network):
            for start, end in pairwise([sigmas[number], middle, sigmas[number + 1]]):
                v_TC, u_TC = said(pack, end_TC, start), said(nulls, end_TC, start)
                end_TC = end_TC + (end - start) * (2 * v_TC - u_TC)
        target_TC = (end_TC - state_TC) / (sigmas[number + 1] - sigmas[number])
        assert problem.noise_N[sample].item() == pytest.approx(sigmas[number], rel=1e-6)
        for ours, plain in ((problem.input_TC, state_TC), (problem.target_TC, target_TC)):
            torch.testing.assert_close(ours[rows].double(), plain[rows], rtol=1e-3, atol=1e-3)
    assert batch.num_samples == 4 and not problem.target_TC[~batch.is_target_T].any()
    assert problem.level_M.tolist() == pytest.approx((1000 * problem.noise_N).tolist())


@pytest.mark.parametrize("steps", [1, 3])
def test_what_a_student_makes_is_summed_beside_the_data(steps: int, groups) -> None:
    """At the end of its last step alone; of the same samples of the data."""
    run, pack, network = a_run(groups, FLOW, steps=steps)
    items, references = training_items(run, [pack], step=4)
    ((batch, problem),) = items
    losses = forward_backward(
        run.model, items, objective=run.config.objective, references=references
    )
    ((loss, _),) = losses.packs
    level = sampling_path(FLOW).schedule([64], num_steps=steps)[steps - 1, 0].item()
    ends_N = problem.noise_N < level + 1e-3
    assert 0 < ends_N.sum() < 4 or steps == 1
    rows = batch.is_target_T & ends_N[batch.segment_T]
    with torch.no_grad():
        raw_TC = network.eval()(problem.input_TC, problem.level_M, batch).double()
    made_TC = problem.input_TC - level * raw_TC
    wanted = [
        [x[rows].numel(), x[rows].sum(), x[rows].square().sum()] for x in (made_TC, pack.latent_TC)
    ]
    torch.testing.assert_close(
        loss.made_23, torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-2
    )


def test_a_dropped_caption_has_the_teacher_without_guidance(groups) -> None:
    """Both of its predictions are one, so that no scale moves the target."""
    objective = replace(FLOW, text_dropout=1.0)
    targets = []
    for scale in (1.0, 4.0):
        run, pack, _ = a_run(groups, objective, teacher_guidance=scale)
        ((_, problem),), _ = training_items(run, [pack], step=4)
        targets.append(problem.target_TC)
    torch.testing.assert_close(*targets, rtol=1e-4, atol=1e-4)


def test_operations_are_those_that_torch_counts(groups) -> None:
    """Of the teacher's passes; those of adapters are not counted."""
    run, _, _ = a_run(groups, FLOW, teacher_guidance=2.0, steps=1)
    # No padding: torch cannot know which tokens count.
    pack = random_pack([(1, 4, 4), (2, 4, 4)], [5, 2], model=run.config.model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, references = training_items(run, [pack], step=4)
    assert references is not None and references.flops == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("objective", "settings", "said"),
    [
        (ObjectiveConfig(), {}, "distill.method=opd needs flow matching, and objective.name=edm"),
        (FLOW, {"adapted": False, "teacher": None}, "with all weights trained needs a teacher"),
        (replace(FLOW, cfg_target=2.0), {}, r"cfg_target=2\.0 does not go with distill.method"),
        (replace(FLOW, preference=Preference.DPO), {}, "objective.preference=dpo does not go with"),
        (
            replace(FLOW, sampling_levels=SamplingLevels.UNIPC),
            {},
            "Euler's steps, and objective.sampling_levels=unipc",
        ),
        (
            replace(FLOW, sampling_timesteps=(1000.0, 500.0)),
            {},
            "distill.steps=4: objective.sampling_timesteps lists 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    objective: ObjectiveConfig, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(Problems, match=said):
        config_of(objective, **settings)


def test_a_student_generates_without_guidance_unless_it_is_told() -> None:
    config = config_of(teacher_guidance=None)
    assert (config.guidance, config.teacher_guidance) == (1, 2.5)
    assert config.passes_without_gradient == 3 + 8 * 2


def _opened(config: RunConfig) -> Any:
    return SimpleNamespace(config=config, path=Path("run"))


def test_samples_are_generated_as_the_student_learned_unless_an_option_says_otherwise() -> None:
    from dit.sampling.commands.generate_media import options_of_network

    of_noise = replace(FLOW, sampling_levels=SamplingLevels.LCM)
    opd, dmd = config_of(steps=4), config_of(of_noise, method=DistillMethod.DMD, steps=2)
    ode = config_of(method=DistillMethod.DMD, student_sampler=StudentSampler.ODE)
    wanted: Any = [(opd, (4, "euler", 1)), (dmd, (2, "lcm", 1)), (ode, (4, "euler", 1))]
    for config, usual in [*wanted, (tiny_run(), (35, "heun", 2.5))]:
        assert config.validation_sampling == usual
        found = options_of_network(GenerationOptions(), _opened(config))
        assert (found.num_steps, found.sampler, found.guidance) == usual
    told = GenerationOptions(num_steps=8, sampler="heun", guidance=2.0)
    found = options_of_network(told, _opened(opd))
    assert (found.num_steps, found.sampler, found.guidance) == (8, "heun", 2)
    keys = ValidationConfig(sampling_steps=3, sampler=Sampler.UNIPC, guidance=1.5)
    validated = replace(opd, validation=keys)
    assert validated.validation_sampling == (3, "unipc", 1.5)
    assert validated.usual_sampling == (4, "euler", 1.5)  # validation.guidance is for both


@pytest.mark.parametrize("sampler", ["euler", "lcm"])
def test_generation_in_another_way_than_was_distilled_is_warned_of(sampler: str) -> None:
    """The sampler is part of a student: one of DMD that makes new noise is no euler's."""
    from dit.sampling.commands.generate_media import _other_than_distilled

    of_noise = replace(FLOW, sampling_levels=SamplingLevels.LCM)
    dmd: Any = {"objective": of_noise, "method": DistillMethod.DMD, "steps": 4}
    config = config_of(steps=4) if sampler == "euler" else config_of(**dmd)
    as_learned = GenerationOptions(num_steps=4, sampler=sampler, guidance=1.0)
    assert _other_than_distilled(config, as_learned) is None
    assert _other_than_distilled(tiny_run(), GenerationOptions()) is None
    unlike = "lcm" if sampler == "euler" else "euler"
    others: Any = ({"num_steps": 8}, {"sampler": "heun"}, {"sampler": unlike}, {"guidance": 2.5})
    for other in others:
        said = _other_than_distilled(config, replace(as_learned, **other))
        assert said is not None and f"--num_steps 4 --sampler {sampler} --guidance 1" in said
