"""DMD2: Gaussians with exact scores in closed form, and a loop over plain calls of networks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.config import (
    DistillConfig,
    DistillMethod,
    LossKind,
    ObjectiveConfig,
    Problems,
    Rollout,
    RunConfig,
    Sampler,
    SamplingLevels,
    StudentSampler,
)
from dit.distributed.data_parallel import main_param_shards
from dit.lora.targets import chosen_adapters
from dit.models.layers.adaptable import adapters_off, is_adapter
from dit.objectives.noise import draw_noise
from dit.objectives.pack_draws import CPU, Draw, pack_rng
from dit.objectives.registry import sampling_path, training_objective
from dit.objectives.trajectory import distribution_gradient
from dit.train.checkpoint.adapters import initialise_adapters
from dit.train.checkpoint.state_dict import TrainProgress
from dit.train.distill import rollouts
from dit.train.distill.distribution_matching import critic_items, student_items
from dit.train.loss import loss_of
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.reference_passes import turns
from dit.train.step import forward_backward, optimizer_step, prepare_update
from tests.learning import tiny_run
from tests.packs import random_pack
from tests.unit.train.test_average_velocity import GRIDS, NULL, TEXTS, config_of

FLOW = ObjectiveConfig(name="flow", text_dropout=0.0, sampling_levels=SamplingLevels.LCM)
DMD: Any = {"method": DistillMethod.DMD}
STEP = 7


def dmd_config(objective: ObjectiveConfig = FLOW, *, adapted: bool = True, **c: Any) -> RunConfig:
    return config_of(objective, adapted=adapted, **(DMD | c))


class Affine:
    """A student that is affine in its state, and the exact denoisers of it and of the data.

    The data are N(m, S S'), and the student of one step makes b + A z of noise z: N(b, A A'). Both
    mix the first `dimensions` features of each token; the others are 0 for both.
    """

    def __init__(self, dimensions: int, **c: Any):
        config = dmd_config(adapted=False, **({"steps": 1} | c))
        made = {"generator": torch.Generator().manual_seed(dimensions), "dtype": torch.float64}
        width = 16
        self.mean_C, self.bias_C = torch.zeros(2, width, dtype=torch.float64)
        self.root_CC, self.gain_CC = torch.zeros(2, width, width, dtype=torch.float64)
        here = slice(dimensions)
        self.mean_C[here] = torch.randn(dimensions, **made)
        self.bias_C[here] = torch.randn(dimensions, **made)
        self.root_CC[here, here] = torch.randn(dimensions, dimensions, **made)
        self.gain_CC[here, here] = torch.randn(dimensions, dimensions, **made)
        self.student, self.critic, self.teacher = (nn.Identity() for _ in range(3))
        self.fitted: Tensor | None = None  # of the critic, in the place of the exact one
        self.run: Any = SimpleNamespace(
            config=config,
            model=SimpleNamespace(chunks=[self.student]),
            critic=SimpleNamespace(chunks=[self.critic]),
            teacher=[self.teacher],
            objective=training_objective(config.objective),
            null=NULL,
        )
        self.pack = random_pack(GRIDS, TEXTS, model=config.model)

    def denoised(self, state_TC: Tensor, level: float, mean_C: Tensor, root_CC: Tensor) -> Tensor:
        """The posterior mean of N(mean, root root') at (1 - t) x + t noise."""
        t, covariance_CC = level, root_CC @ root_CC.T
        eye_CC = torch.eye(len(mean_C), dtype=torch.float64)
        gain_CC = (
            (1 - t) * covariance_CC @ torch.inverse((1 - t) ** 2 * covariance_CC + t**2 * eye_CC)
        )
        return mean_C + (state_TC - (1 - t) * mean_C) @ gain_CC.T

    def latent(self, chunk: nn.Module, state_TC: Tensor, level: float) -> Tensor:
        if chunk is self.student:
            return self.bias_C + state_TC @ self.gain_CC.T
        if chunk is self.teacher:
            return self.denoised(state_TC, level, self.mean_C, self.root_CC)
        return self.denoised(state_TC, level, self.bias_C, self.gain_CC)

    def answers(self, chunks: Any, items: Any, **_: Any) -> list[Tensor]:
        """In the place of passes through networks: velocities, in float64."""
        outputs = []
        for batch, problem in items:
            state_TC = problem.input_TC.double()
            out_TC = torch.zeros_like(state_TC)
            for sample, told in enumerate(problem.level_M.tolist()):
                rows, level = batch.segment_T == sample, told / 1000
                latent_TC = self.latent(chunks[0], state_TC[rows], level)
                out_TC[rows] = (state_TC[rows] - latent_TC) / level
            outputs.append(out_TC)
        return outputs


@pytest.fixture
def affine(monkeypatch):
    def made(dimensions: int, **c: Any) -> Affine:
        found = Affine(dimensions, **c)
        monkeypatch.setattr(rollouts, "whole_outputs", found.answers)
        return found

    return made


def latent_gradient(item: Any, raw_TC: Tensor) -> Tensor:
    """The gradient of a pack's summed loss by the latents of the student at level 1, [T, C]."""
    batch, problem = item
    raw_TC = raw_TC.float().requires_grad_()
    loss_of(batch, problem, raw_TC, ObjectiveConfig(name="flow")).total.backward()
    assert raw_TC.grad is not None
    return -raw_TC.grad.double() * raw_TC.shape[1]  # the error is a mean over features


@pytest.mark.parametrize("dimensions", [1, 2])
def test_the_gradient_is_that_of_exact_scores(dimensions: int, affine) -> None:
    """By the latents: (fake - real) / mean |latent - real|, of each sample by itself."""
    found = affine(dimensions)
    ((batch, problem),), _ = student_items(found.run, [found.pack], step=STEP)
    told: Any = {"seed": found.run.config.rng.seed, "step": STEP, "pack_id": batch.pack_id}
    told |= {"device": CPU}
    noise_TC = draw_noise(batch, pack_rng(**told, draw=Draw.NOISE)).double()
    other_TC = draw_noise(batch, pack_rng(**told, draw=Draw.STUDENT_NOISE)).double()
    uniform_N = torch.rand(
        len(GRIDS), generator=pack_rng(**told, draw=Draw.STUDENT_LEVEL), dtype=torch.float64
    )
    within = training_objective(replace(FLOW, level_range=(0.02, 0.98)))
    levels = within.levels(uniform_N, batch.latent_tokens).tolist()
    assert all(0.02 <= level <= 0.98 for level in levels) and len(set(levels)) == len(GRIDS)
    (raw_TC,) = found.answers([found.student], [(batch, problem)])
    gradient_TC = latent_gradient((batch, problem), raw_TC)
    for sample, t in enumerate(levels):
        rows = (batch.segment_T == sample) & batch.is_target_T
        latent_TC = found.bias_C + noise_TC[rows] @ found.gain_CC.T
        state_TC = (1 - t) * latent_TC + t * other_TC[rows]
        real_TC = found.denoised(state_TC, t, found.mean_C, found.root_CC)
        fake_TC = found.denoised(state_TC, t, found.bias_C, found.gain_CC)
        true_TC = (fake_TC - real_TC) / (latent_TC - real_TC).abs().mean()
        torch.testing.assert_close(gradient_TC[rows], true_TC, rtol=1e-5, atol=1e-5)
        assert true_TC.abs().max() > 0.1 and not true_TC[:, dimensions:].any()
        # As scores: grad log p(y) = ((1 - t) x - y) / t², of a Gaussian in closed form.
        here = slice(dimensions)
        root_CC, mean_C = found.root_CC[here, here], found.mean_C[here]
        eye_CC = t**2 * torch.eye(dimensions, dtype=torch.float64)
        inverse_CC = torch.inverse((1 - t) ** 2 * root_CC @ root_CC.T + eye_CC)
        score_TC = -(state_TC[:, here] - (1 - t) * mean_C) @ inverse_CC.T
        of_latent_TC = ((1 - t) * real_TC[:, here] - state_TC[:, here]) / t**2
        torch.testing.assert_close(of_latent_TC, score_TC, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_at_the_data_there_is_no_gradient(dimensions: int, affine) -> None:
    found = affine(dimensions)
    found.bias_C, found.gain_CC = found.mean_C, found.root_CC
    ((batch, problem),), _ = student_items(found.run, [found.pack], step=STEP)
    (raw_TC,) = found.answers([found.student], [(batch, problem)])
    assert latent_gradient((batch, problem), raw_TC).abs().max() < 1e-5


@pytest.mark.parametrize("learns", [True, False])
def test_a_student_finds_the_data_where_its_critic_learns(learns: bool, affine) -> None:
    """The critic is the exact one of the mean and deviation of the latents of `critic_items`.

    One that stays as it began leads elsewhere.
    """
    found = affine(1, student_every=1)
    mean, std = 1.5, 0.8
    found.mean_C[0], found.root_CC[0, 0] = mean, std
    found.bias_C[0], found.gain_CC[0, 0] = 0.0, 0.3
    fitted: dict[str, float] = {}

    def denoised(chunk: nn.Module, state_TC: Tensor, level: float) -> Tensor:
        if chunk is not found.critic:
            return Affine.latent(found, chunk, state_TC, level)
        gain_CC, bias_C = torch.zeros_like(found.root_CC), torch.zeros_like(found.mean_C)
        gain_CC[0, 0], bias_C[0] = fitted["std"], fitted["mean"]
        return found.denoised(state_TC, level, bias_C, gain_CC)

    found.latent = denoised
    for step in range(1, 161):
        ((batch, problem),), _ = critic_items(found.run, [found.pack], step=step)
        if learns or step == 1:
            learned_T = batch.latent_TC[batch.is_target_T, 0].double()
            fitted |= {"mean": learned_T.mean().item(), "std": learned_T.std().item()}
        ((batch, problem),), _ = student_items(found.run, [found.pack], step=step)
        (raw_TC,) = found.answers([found.student], [(batch, problem)])
        gradient_TC = latent_gradient((batch, problem), raw_TC)
        state_TC, count = problem.input_TC.double(), int(batch.is_target_T.sum())
        rate = 0.1 if step <= 100 else 0.02
        found.bias_C = found.bias_C - rate * gradient_TC.sum(0) / count / 16
        found.gain_CC = found.gain_CC - rate * gradient_TC.T @ state_TC / count / 16
    made = [found.bias_C[0].item(), abs(found.gain_CC[0, 0].item())]
    assert (made == pytest.approx([mean, std], rel=0.05)) == learns


def a_run(groups, objective: ObjectiveConfig = FLOW, **c: Any) -> Any:
    """A run of random adapters of a student and of a critic, beside the same random weights."""
    config = dmd_config(objective, **({"steps": 3, "student_every": 2} | c))
    chosen = chosen_adapters(config.model, config.lora)
    model = build_model_and_optimizer(
        config, groups, fill=partial(randomise, seed=3), adapters=chosen
    )
    critic = build_model_and_optimizer(
        config.of_critic,
        groups,
        fill=partial(randomise, seed=5, chosen=is_adapter),
        adapters=chosen,
        base=model.modules,
    )
    return SimpleNamespace(
        config=config,
        model=model,
        critic=critic,
        objective=training_objective(objective),
        null=NULL,
        teacher=(),
        progress=TrainProgress(),
    )


@pytest.mark.parametrize("sampler", StudentSampler)
@pytest.mark.parametrize("rollout", Rollout)
def test_targets_are_those_of_plain_calls(sampler, rollout, groups) -> None:  # noqa: PLR0915
    """Each sample by itself; the teacher is the base without adapters, with guidance 2."""
    levels = SamplingLevels.LCM if sampler is StudentSampler.SDE else SamplingLevels.LINEAR
    objective = replace(FLOW, sampling_levels=levels, flow_shift=3.0)
    told = {"teacher_guidance": 2.0, "student_sampler": sampler, "rollout": rollout}
    run = a_run(groups, objective, **told)
    pack = random_pack(GRIDS, TEXTS, model=run.config.model)
    student, critic = (one.chunks[0].module for one in (run.model, run.critic))
    path, seed = sampling_path(objective), run.config.rng.seed
    t_S = path.schedule([64], num_steps=3)[:, 0].tolist()
    nulls = pack.with_text("text", torch.cat([NULL["text"]] * 4), (0, 3, 6, 9, 12))
    told: Any = {"seed": seed, "step": STEP, "pack_id": pack.pack_id, "device": CPU}

    def velocity(network: Any, batch: Any, state_TC: Tensor, level: float) -> Tensor:
        with torch.no_grad():
            level_N = torch.full((len(GRIDS),), 1000 * level)
            return network.eval()(state_TC.float(), level_N, batch).double()

    def made(noise: Draw, step: Draw) -> list[tuple[Tensor, Tensor, float]]:
        """State, latent and level of the student where each sample's step begins."""
        rng = pack_rng(**told, draw=noise)
        noises = [draw_noise(pack, rng).double() for _ in range(3)]
        steps = torch.rand(4, generator=pack_rng(**told, draw=step), dtype=torch.float64) * 3
        found = []
        for number in steps.long().tolist():
            state_TC, level = noises[0], 1.0
            if rollout is Rollout.DATA:
                level = t_S[number]
                state_TC = (1 - level) * pack.latent_TC.double() + level * noises[0]
            for k in range(number if rollout is Rollout.SIMULATE else 0):
                v_TC, end = velocity(student, pack, state_TC, level), t_S[k + 1]
                if sampler is StudentSampler.ODE:
                    state_TC = state_TC + (end - level) * v_TC
                else:
                    state_TC = (1 - end) * (state_TC - level * v_TC) + end * noises[k + 1]
                level = end
            latent_TC = state_TC - level * velocity(student, pack, state_TC, level)
            found.append((state_TC, latent_TC, level))
        return found

    ((batch, problem),), references = student_items(run, [pack], step=STEP)
    assert student.training and critic.training and references.flops > 0
    noise_TC = draw_noise(pack, pack_rng(**told, draw=Draw.STUDENT_NOISE)).double()
    quantile_N = torch.rand(
        4, generator=pack_rng(**told, draw=Draw.STUDENT_LEVEL), dtype=torch.float64
    )
    objective = training_objective(replace(objective, level_range=(0.02, 0.98)))
    levels = objective.levels(quantile_N, pack.latent_tokens).tolist()
    assert len({level for *_, level in made(Draw.NOISE, Draw.STUDENT_STEP)}) > 1
    for sample, (state_TC, latent_TC, level) in enumerate(made(Draw.NOISE, Draw.STUDENT_STEP)):
        rows, t = (pack.segment_T == sample) & pack.is_target_T, levels[sample]
        noisy_TC = (1 - t) * latent_TC + t * noise_TC
        fake_TC = noisy_TC - t * velocity(critic, pack, noisy_TC, t)
        with adapters_off(student):
            v_TC, u_TC = (velocity(student, one, noisy_TC, t) for one in (pack, nulls))
        real_TC = noisy_TC - t * (2 * v_TC - u_TC)
        away = (latent_TC - real_TC)[rows].abs().mean()
        target_TC = latent_TC - (fake_TC - real_TC) / away
        ours_TC = state_TC - level * problem.target_TC.double()
        torch.testing.assert_close(ours_TC[rows], target_TC[rows], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            problem.input_TC[rows].double(), state_TC[rows], rtol=1e-3, atol=1e-3
        )
        assert problem.weight_N[sample].item() == pytest.approx(level**2 / 2, rel=1e-5)
    ((batch, problem),), _ = critic_items(run, [pack], step=STEP)
    noise_TC = draw_noise(pack, pack_rng(**told, draw=Draw.CRITIC_NOISE)).double()
    for sample, (_, latent_TC, _) in enumerate(made(Draw.CRITIC_ROLLOUT, Draw.CRITIC_STEP)):
        rows = (pack.segment_T == sample) & pack.is_target_T
        torch.testing.assert_close(
            batch.latent_TC[rows].double(), latent_TC[rows], rtol=1e-3, atol=1e-3
        )
        plain_TC = (noise_TC - latent_TC)[rows]
        torch.testing.assert_close(problem.target_TC[rows].double(), plain_TC, rtol=1e-3, atol=1e-3)


def test_a_critic_that_is_the_teacher_moves_nothing_to_the_bit(groups) -> None:
    """As at the start, where its adapters add nothing; it has latents to learn, however."""
    run = a_run(groups)
    for module in run.critic.modules:
        initialise_adapters(module, run.config)
    pack = random_pack(GRIDS, TEXTS, model=run.config.model)
    items, _ = student_items(run, [pack], step=STEP)
    losses = forward_backward(run.model, items, objective=run.config.objective)
    assert losses.total == 0
    assert prepare_update(run.model).item() == 0
    items, _ = critic_items(run, [pack], step=STEP)
    assert forward_backward(run.critic, items, objective=run.config.of_critic.objective).total > 0


def test_samples_of_a_pack_have_divisors_of_their_own() -> None:
    """Two samples in a pack, of which one is far from what the teacher says: each as alone."""
    model = tiny_run().model
    both, alone = (
        random_pack(grids, [1] * len(grids), model=model) for grids in (GRIDS, GRIDS[:1])
    )
    made = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    latent_TC, real_TC, fake_TC = (torch.randn(both.latent_TC.shape, **made) for _ in range(3))
    latent_TC[both.segment_T > 0] *= 100
    whole_TC = distribution_gradient(both, latent_TC, real_TC=real_TC, fake_TC=fake_TC)
    rows = slice(len(alone.segment_T))
    one_TC = distribution_gradient(
        alone, latent_TC[rows], real_TC=real_TC[rows], fake_TC=fake_TC[rows]
    )
    torch.testing.assert_close(whole_TC[rows], one_TC, rtol=1e-12, atol=0)
    same_TC = distribution_gradient(both, real_TC, real_TC=real_TC, fake_TC=real_TC)
    assert not same_TC.any()  # and no NaN


def test_student_and_critic_draw_other_numbers(groups, monkeypatch) -> None:
    """Noise, drawn steps, levels and noise at these: none is shared in a step."""
    run = a_run(groups)
    pack = random_pack(GRIDS, TEXTS, model=run.config.model)
    seen: list[tuple[Tensor, Tensor]] = []
    begin = rollouts.begin

    def noted(*a: Any) -> Any:
        start = begin(*a)
        seen.append((start.noisy.state_TC, start.step_N))
        return start

    monkeypatch.setattr("dit.train.distill.distribution_matching.begin", noted)
    critic_items(run, [pack], step=STEP)
    student_items(run, [pack], step=STEP)
    (noise_TC, step_N), (other_TC, other_N) = seen
    rows = pack.is_target_T
    assert not (noise_TC[rows] == other_TC[rows]).any() and not torch.equal(step_N, other_N)
    mine = [Draw.NOISE, Draw.STUDENT_STEP, Draw.STUDENT_LEVEL, Draw.STUDENT_NOISE]
    theirs = [Draw.CRITIC_ROLLOUT, Draw.CRITIC_STEP, Draw.CRITIC_LEVEL, Draw.CRITIC_NOISE]
    told: Any = {"seed": 1, "step": 2, "pack_id": 3, "device": CPU}
    numbers = [torch.rand(1, generator=pack_rng(**told, draw=d)).item() for d in mine + theirs]
    assert len(set(numbers)) == 8


@pytest.mark.parametrize("alone", [False, True])
def test_turns_follow_the_cycle_and_change_their_own_network(alone: bool, groups) -> None:
    run = a_run(groups, critic_alone=alone, critic_lr=3e-4, student_every=3)
    pack = random_pack(GRIDS, TEXTS, model=run.config.model)
    networks = {"student": run.model, "critic": run.critic}
    frozen = [p for p in run.model.modules[0].parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    learned: list[str] = []
    for step in range(1, 5):
        run.progress = replace(run.progress, step=step - 1)
        for turn in turns(run, [pack], step=step):
            name = "critic" if turn.critic else "student"
            learned.append(f"{step} {name}")
            values = {
                n: [s.value.clone() for s in main_param_shards(m.optimizer)]
                for n, m in networks.items()
            }
            losses = forward_backward(turn.model, turn.items, objective=turn.config.objective)
            number = {"number": turn.number, "averaged": turn.averaged}
            optimizer_step(turn.model, config=turn.config, loss=losses.total, **number)
            for n, m in networks.items():
                now = [s.value for s in main_param_shards(m.optimizer)]
                same = all(map(torch.equal, values[n], now))
                assert same == (n != name)
            if not turn.critic:
                assert (turn.number, turn.averaged, turn.prefix) == (3, 1, "")
    both = ["3 student"] if alone else ["3 critic", "3 student"]
    assert learned == ["1 critic", "2 critic", *both, "4 critic"]
    assert all(map(torch.equal, before, frozen))
    assert run.critic.ema is None and run.model.ema is not None
    assert run.config.of_critic.optimizer.lr == 3e-4


def test_adapters_of_both_stand_beside_one_base_in_memory(groups) -> None:
    run = a_run(groups)
    student, critic = (dict(m.modules[0].named_parameters()) for m in (run.model, run.critic))
    assert student.keys() == critic.keys()
    for name in student:
        shared = student[name].data_ptr() == critic[name].data_ptr()
        assert shared != is_adapter(name), name


@pytest.mark.parametrize(
    ("objective", "settings", "said"),
    [
        (ObjectiveConfig(), {}, "distill.method=dmd needs flow matching, and objective.name=edm"),
        (FLOW, {"adapted": False, "teacher": None}, "with all weights trained needs a teacher"),
        (FLOW, {"gan_weight": 0.03}, "gan_weight=0.03: this program has no GAN loss; leave it out"),
        (FLOW, {"levels": (0.5, 0.2)}, r"levels=\[0.5, 0.2\] must be two noise levels"),
        (FLOW, {"student_every": 0}, "student_every=0"),
        (replace(FLOW, loss=LossKind.HUBER), {}, "objective.loss=huber does not go with"),
        (
            replace(FLOW, sampling_levels=SamplingLevels.LINEAR),
            {},
            "distill.student_sampler=sde makes new noise at each level",
        ),
        (FLOW, {"student_sampler": StudentSampler.ODE}, "takes Euler's steps"),
    ],
)
def test_what_cannot_be_is_refused(
    objective: ObjectiveConfig, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(Problems, match=said):
        dmd_config(objective, **settings)


def test_the_sampler_of_a_student_is_part_of_it() -> None:
    config = dmd_config()
    assert config.distill.sampler is Sampler.LCM
    assert config.student_sampling == "4 steps of lcm, guidance 1"
    linear = replace(FLOW, sampling_levels=SamplingLevels.LINEAR)
    assert dmd_config(linear, student_sampler=StudentSampler.ODE).distill.sampler is Sampler.EULER
    # Four steps twice, of which the last has the latent; the critic, the teacher.
    assert config.passes_without_gradient == 4 + 4 + 1 + 1
    assert DistillConfig().sampler is Sampler.EULER
