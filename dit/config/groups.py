"""Checkpoints, distillation, logs; all groups of a run, and values that follow from several."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dit.config.checks import at_least_one, check, not_negative, numbers, positive, within
from dit.config.choices import DistillMethod, Rollout, Sampler, StudentSampler
from dit.config.data import DatasetConfig, MockGeometry
from dit.config.lora import LoraConfig
from dit.config.model import ModelConfig
from dit.config.objective import ObjectiveConfig
from dit.config.resume import AtStart, Live, Refused
from dit.config.training import (
    DdpConfig,
    Decay,
    DistConfig,
    EmaConfig,
    OptimizerConfig,
    RngConfig,
    SchedulerConfig,
    TrainConfig,
)
from dit.config.validation import MOST_GUIDANCE, ValidationConfig
from dit.local_path import LocalPath, StoreAddress

GUIDANCE = 2.5
"""Default guidance scale of networks without guidance embedding; docs/small_data.md has figures."""


class UsualSampling(NamedTuple):
    """How samples of a network are generated if no option says otherwise."""

    steps: int
    sampler: Sampler
    guidance: float  # scale g in uncond + g (cond - uncond)


class Weights(StrEnum):
    """Weights of a checkpoint to use: the trained ones, or their average (EMA)."""

    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and where checkpoints are saved, and the checkpoint from which the run starts."""

    save: Live[LocalPath | None] = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: AtStart[LocalPath | None] = None
    """Run folder or checkpoint from which a new run continues; null: `save`."""
    mirror: Live[StoreAddress | None] = None
    """Object store, msc://PROFILE/PATH, that gets a copy of each checkpoint in the background."""
    load_hf: AtStart[LocalPath | None] = None
    """Diffusers folder, of a transformer or a pipeline, with whose weights a new run starts."""
    load_data_position: Live[bool] = True
    """Continue at the checkpoint's position in the data; false restarts the data at this resume."""
    save_interval: Live[int] = 1000
    """Steps between checkpoints; a checkpoint is always saved at the end."""
    keep_last: Live[int] = 3
    """Number of newest checkpoints to keep, besides the one of lowest validation loss; 0 keeps
    all."""
    async_save: Live[bool] = False
    """Write in the background; the run waits only for the copy to host memory."""
    also_save_hf: Live[bool] = False
    """Export each checkpoint for Hugging Face Diffusers as well, to `diffusers` in `save`."""
    finetune: AtStart[bool] = False
    """Load only the weights of `load`, and start a new run in `save` at step 0."""
    finetune_weights: AtStart[Weights] = Weights.MODEL
    """Weights that `finetune` loads: the trained ones (model), or their average (ema)."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "save_interval"),
            *not_negative(self, "keep_last"),
            (
                not self.also_save_hf or self.save is not None,
                "also_save_hf=true exports into save, which is null; set checkpoint.save",
            ),
            (
                self.mirror is None or self.save is not None,
                f"mirror={self.mirror} copies the checkpoints in save, which is null; set"
                " checkpoint.save",
            ),
            (
                not self.finetune or (self.load is not None and self.load != self.save),
                f"finetune=true takes weights from load={self.load} into a new run in"
                f" save={self.save}; set both, to different folders",
            ),
            (
                self.load_hf is None or self.load is None,
                f"load_hf={self.load_hf} and load={self.load} both say where the weights of a new"
                f" run come from{' (finetune=true)' if self.finetune else ''}; leave one of them"
                " out. A run goes on from the checkpoints in save by itself",
            ),
            *numbers(self),
        )


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """A student learns from a teacher to generate in few steps, without guidance."""

    method: Refused[DistillMethod | None] = None
    """opd: on a drawn step of the student's own Euler trajectory, the target is the teacher's mean
    velocity over this step. dmd: DMD2, in which a critic learns the student's distribution, and
    the student moves from the critic's prediction towards the teacher's. null: no distillation."""
    steps: Refused[int] = 4
    """Steps of the student, from noise to the latent, at the noise levels of an Euler sampler with
    as many steps."""
    teacher: Live[LocalPath | None] = None
    """Run folder, checkpoint or Diffusers folder of the teacher, whose network is the student's;
    null: the base, if the student consists of adapters."""
    teacher_weights: Refused[Weights] = Weights.EMA
    """Weights of a teacher that is a checkpoint: the trained ones (model), or their EMA (ema)."""
    teacher_guidance: Refused[float | None] = None
    """Guidance scale of the teacher, which the student learns; null: 2.5, or 1 if the network has a
    guidance embedding."""
    teacher_steps: Refused[int] = 8
    """Euler steps of the teacher for each step of the student; with 1 the student learns only
    guidance, not fewer steps."""
    rollout: Refused[Rollout] = Rollout.SIMULATE
    """Noisy states from which dmd's student predicts: those of its own steps (simulate), or the
    data's latents with noise (data)."""
    student_sampler: Refused[StudentSampler] = StudentSampler.SDE
    """How dmd's student goes from one step to the next, in training and generation: sde (its
    predicted latent with new noise, as sampler lcm), or ode (euler)."""
    levels: Refused[tuple[float, float]] = (0.02, 0.98)
    """Lowest and highest noise level that dmd adds to the student's latents before teacher and
    critic see them; levels between these are drawn from objective.density."""
    critic_lr: Live[float | None] = None
    """Learning rate of dmd's critic; null: optimizer.lr."""
    critic_lr_decay_style: Live[Decay | None] = None
    """Shape of the critic's learning rate after warm-up; null: scheduler.lr_decay_style."""
    critic_lr_warmup_iters: Live[int | None] = None
    """Updates in which the critic's learning rate rises; null: scheduler.lr_warmup_iters."""
    critic_ema_decay: Live[float | None] = None
    """EMA decay of the critic's weights per update; null: the critic has no EMA."""
    critic_load: AtStart[LocalPath | None] = None
    """Initial weights of the critic: run folder, checkpoint or Diffusers folder; for adapters, a
    LoRA file or folder. null: the teacher's weights."""
    student_every: Refused[int] = 5
    """Steps from one update of dmd's student to the next; its critic is updated in every step."""
    critic_alone: Refused[bool] = False
    """Whether dmd's critic is not updated in steps that update the student."""
    gan_weight: Live[float] = 0.0
    """Weight of a GAN loss: a key of other tools that this project lacks, refused above 0."""

    def __post_init__(self) -> None:
        low, high = self.levels
        check(
            *at_least_one(self, "steps", "teacher_steps", "student_every"),
            *positive(self, "critic_lr"),
            *not_negative(self, "critic_lr_warmup_iters"),
            (
                self.critic_ema_decay is None or 0 < self.critic_ema_decay < 1,
                f"critic_ema_decay={self.critic_ema_decay} must be above 0 and below 1",
            ),
            within(self, "teacher_guidance", -MOST_GUIDANCE, MOST_GUIDANCE),
            (
                0 < low < high <= 1,
                f"levels={[low, high]} must be two noise levels, 0 < lowest < highest <= 1; [0.02,"
                " 0.98] is usual",
            ),
            (
                self.gan_weight == 0,
                f"gan_weight={self.gan_weight:g}: this program has no GAN loss; leave it out",
            ),
            *numbers(self, steps=1000, teacher_steps=1000, student_every=2**30, critic_lr=1000),
        )

    @property
    def sampler(self) -> Sampler:
        """The sampler for which the student is trained."""
        noisy = self.method is DistillMethod.DMD and self.student_sampler is StudentSampler.SDE
        return Sampler.LCM if noisy else Sampler.EULER


class WandbMode(StrEnum):
    """W&B logging: online, into the run folder for `wandb sync` (offline), or none (disabled)."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


class MlperfDivision(StrEnum):
    """Rules of MLPerf that a log is written for: closed or open division."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Logging of metrics: terminal, metrics.jsonl, TensorBoard, W&B."""

    log_interval: Live[int] = 10
    """Steps between lines in the terminal, TensorBoard and W&B; metrics.jsonl has every step."""
    tensorboard_dir: Live[LocalPath | None] = None
    """Folder of TensorBoard's files; null: `tensorboard` in the run folder."""
    wandb_project: Live[str | None] = None
    """Project in W&B; null: no logging to W&B."""
    wandb_exp_name: Live[str | None] = None
    """Name of the run in W&B; null: the name of the run folder."""
    wandb_entity: Live[str | None] = None
    """User or team in W&B; null: the default of the account."""
    wandb_mode: Live[WandbMode | None] = None
    """online, offline (files in the run folder), or disabled; null: $WANDB_MODE, else online."""
    mlperf_division: Live[MlperfDivision | None] = None
    """Rules (closed or open) of the log RUN/mlperf.log, in MLPerf Training's form for FLUX.1; null:
    no such log."""
    mlperf_org: Live[str] = "not a submission"
    """Name of the submitter in MLPerf's log."""
    price_per_gpu_hour: Live[float | None] = None
    """Price of one device for an hour; the last lines of the log then have the cost of the run."""
    watts_per_gpu: Live[float | None] = None
    """Watts of one device with its part of the machine; the last lines of the log then have the
    energy of the run."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "log_interval"),
            *positive(self, "price_per_gpu_hour", "watts_per_gpu"),
            (self.mlperf_org != "", "mlperf_org='' names nobody; write the submitter's name"),
            *numbers(self, price_per_gpu_hour=2**30, watts_per_gpu=2**30),
        )


@dataclass(frozen=True, kw_only=True)
class RunGroups:
    """All groups, each already checked by itself; `RunConfig` checks them against each other."""

    model: ModelConfig
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RngConfig = field(default_factory=RngConfig)

    @property
    def samples(self) -> bool:
        """Whether the run generates samples at validations, for which it needs a run folder."""
        train, c = self.train, self.validation
        validates = train.eval_interval > 0 and train.eval_iters > 0
        return validates and c.samples and self.checkpoint.save is not None

    @property
    def usual_sampling(self) -> UsualSampling:
        """Default steps, sampler and guidance of generation, playground, evaluation and validation.

        Steps and sampler are those for which a distilled student is trained, and for other
        networks 35 steps of Heun's method.
        """
        c = self.distill
        if c.method is None:
            return UsualSampling(steps=35, sampler=Sampler.HEUN, guidance=self.guidance)
        return UsualSampling(steps=c.steps, sampler=c.sampler, guidance=self.guidance)

    @property
    def guidance(self) -> float:
        """Default guidance scale g in uncond + g (cond - uncond) for samples of this network.

        It is `validation.guidance` if set. Otherwise it is 1 for a distilled student and for
        networks with a guidance embedding or without guidance, and `GUIDANCE` for others.
        """
        if self.validation.guidance is not None:
            return self.validation.guidance
        return 1.0 if self.distill.method is not None else self._usual_guidance

    @property
    def teacher_guidance(self) -> float:
        """Guidance scale of the teacher in a distillation."""
        told = self.distill.teacher_guidance
        return self._usual_guidance if told is None else told

    @property
    def has_critic(self) -> bool:
        """Whether the run trains a critic besides its main network."""
        return self.distill.method is DistillMethod.DMD

    @property
    def validation_sampling(self) -> UsualSampling:
        """Steps, sampler and guidance of validation: its keys, or where they are null the usual."""
        c, usual = self.validation, self.usual_sampling
        return UsualSampling(
            steps=usual.steps if c.sampling_steps is None else c.sampling_steps,
            sampler=c.sampler or usual.sampler,
            guidance=usual.guidance,
        )

    @property
    def student_sampling(self) -> str | None:
        """Steps, sampler and guidance of a distilled network as a phrase; None for others."""
        c = self.distill
        return None if c.method is None else f"{c.steps} steps of {c.sampler}, guidance 1"

    def unlike_student(
        self, steps: int | None, sampler: str | None, guidance: float | None
    ) -> str | None:
        """A warning if `steps`, `sampler` or `guidance` differ from those of a student's training.

        Returns None if they agree, or if the network is not distilled.
        """
        c = self.distill
        if c.method is None or (steps, str(sampler), guidance) == (c.steps, str(c.sampler), 1):
            return None
        scale = "of the guider" if guidance is None else f"{guidance:g}"
        return (
            f"WARNING: the network was distilled for {self.student_sampling}, but here it samples"
            f" with {steps} steps of {sampler}, guidance {scale}: pictures lose quality. Leave"
            " these options out to sample as the network was distilled"
        )

    @property
    def _usual_guidance(self) -> float:
        told = self.objective.guidance is not None or self.model.unguided_by is not None
        return 1.0 if told else GUIDANCE

    @property
    def passes_without_gradient(self) -> int:
        """Largest number, over steps, of forward passes without gradients over each pack."""
        c, guided = self.distill, 1 if self.teacher_guidance == 1 else 2
        if c.method is None:
            return self.objective.passes_without_gradient
        if c.method is DistillMethod.OPD:
            return c.steps - 1 + c.teacher_steps * guided
        made = c.steps if c.rollout is Rollout.SIMULATE else 1
        return made * (1 if c.critic_alone else 2) + 1 + guided

    @property
    def mean_passes_without_gradient(self) -> float:
        """Mean over the steps of the number of forward passes without gradients over each pack."""
        c, most = self.distill, self.passes_without_gradient
        if not self.has_critic:
            return most
        made = c.steps if c.rollout is Rollout.SIMULATE else 1
        # Beside the student's own passes, the critic's and the teacher's.
        of_student = most - made * (1 if c.critic_alone else 2)
        return made * self.learning_passes + of_student / c.student_every

    @property
    def learning_passes(self) -> float:
        """Mean number of passes with gradients over each pack of a step, a critic's included."""
        c = self.distill
        return 1 + (self.has_critic and not c.critic_alone) / c.student_every

    @property
    def decay_iters(self) -> int:
        """The update at which the learning rate stops falling."""
        return self.scheduler.lr_decay_iters or self.train.train_iters

    @property
    def sample_multiple(self) -> int:
        """Each sample of a pack is padded to a multiple of this number of tokens."""
        return math.lcm(self.dataset.sample_multiple, self.model.attended_multiple)

    def mock_tokens(self, geometry: MockGeometry) -> int:
        """Number of tokens of one mock sample, padded to `sample_multiple`."""
        multiple = self.sample_multiple
        tokens = self.model.tokens_of(geometry.frames, geometry.height, geometry.width)
        return -(-tokens // multiple) * multiple

    def optimizer_ranks(self, replicas: int) -> int:
        """Number of ranks that share one copy of the optimizer state, with `replicas` replicas.

        It is 1 without the distributed optimizer. Context ranks have the same weights, so they
        share the state as well.
        """
        if not self.ddp.use_distributed_optimizer:
            return 1
        return replicas * self.model.context_parallel_size // self.ddp.dp_replicate_size
