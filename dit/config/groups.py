"""Checkpoints and logs; the groups of a run side by side, and what follows from several."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from dit.config.checks import at_least_one, check, not_negative, numbers, positive
from dit.config.data import DatasetConfig, MockGeometry
from dit.config.lora import LoraConfig
from dit.config.model import ModelConfig
from dit.config.objective import ObjectiveConfig
from dit.config.resume import AtStart, Live
from dit.config.training import (
    DdpConfig,
    DistConfig,
    EmaConfig,
    OptimizerConfig,
    RngConfig,
    SchedulerConfig,
    TrainConfig,
)
from dit.config.validation import ValidationConfig
from dit.local_path import LocalPath, StoreAddress

GUIDANCE = 2.5
"""Guidance of networks that have no guidance embedding; docs/small_data.md has figures."""


class Weights(StrEnum):
    """Which weights of a checkpoint: the trained ones, or their average (EMA)."""

    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where checkpoints are saved, and from which checkpoint the run starts."""

    save: Live[LocalPath | None] = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: AtStart[LocalPath | None] = None
    """Run folder or checkpoint that a new run continues from; null means `save`."""
    mirror: Live[StoreAddress | None] = None
    """Object store, msc://PROFILE/PATH, that gets a copy of each checkpoint in the background."""
    load_hf: AtStart[LocalPath | None] = None
    """Diffusers folder, of a transformer or a pipeline, whose weights a new run starts from."""
    load_data_position: Live[bool] = True
    """Continue the data where the checkpoint left them; false starts them anew, once (new data)."""
    save_interval: Live[int] = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: Live[int] = 3
    """Newest checkpoints to keep, beside the one of lowest validation loss; 0 keeps all."""
    async_save: Live[bool] = False
    """Write in the background; the run waits only for the copy to host memory."""
    also_save_hf: Live[bool] = False
    """Export each checkpoint for Hugging Face Diffusers as well, to `diffusers` in `save`."""
    finetune: AtStart[bool] = False
    """Take only the weights from `load`, and start a new run in `save` at step 0."""
    finetune_weights: AtStart[Weights] = Weights.MODEL
    """Which weights `finetune` takes: the trained ones (model), or their average (ema)."""

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


class WandbMode(StrEnum):
    """Whether W&B is logged to directly, into the run folder for `wandb sync`, or not at all."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Logging of metrics: terminal, metrics.jsonl, TensorBoard, W&B."""

    log_interval: Live[int] = 10
    """Steps between lines in the terminal, TensorBoard and W&B; metrics.jsonl has every step."""
    tensorboard_dir: Live[LocalPath | None] = None
    """Null is `tensorboard` in the run folder."""
    wandb_project: Live[str | None] = None
    """Project in W&B; null does not log there."""
    wandb_exp_name: Live[str | None] = None
    """Name of the run in W&B; null is the name of the run folder."""
    wandb_entity: Live[str | None] = None
    """User or team in W&B; null is the account's own."""
    wandb_mode: Live[WandbMode | None] = None
    """online, offline (kept in the run folder), or disabled; null is $WANDB_MODE, else online."""
    price_per_gpu_hour: Live[float | None] = None
    """Price of one device for an hour; a run ends with what it cost since its start."""
    watts_per_gpu: Live[float | None] = None
    """Watts that one device takes with its part of the machine; a run ends with its energy."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "log_interval"),
            *positive(self, "price_per_gpu_hour", "watts_per_gpu"),
            *numbers(self, price_per_gpu_hour=2**30, watts_per_gpu=2**30),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGroups:
    """Each has checked itself; `RunConfig` checks them against each other."""

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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RngConfig = field(default_factory=RngConfig)

    @property
    def samples(self) -> bool:
        """Whether the run generates samples at validations; that needs a run folder to write to."""
        train, c = self.train, self.validation
        validates = train.eval_interval > 0 and train.eval_iters > 0
        return validates and c.samples and self.checkpoint.save is not None

    @property
    def guidance(self) -> float:
        """Scale g in uncond + g (cond - uncond) of what is generated, if none is asked for."""
        if self.validation.guidance is not None:
            return self.validation.guidance
        return GUIDANCE if self.objective.guidance is None else 1.0

    @property
    def decay_iters(self) -> int:
        """Step at which the learning rate reaches its end."""
        return self.scheduler.lr_decay_iters or self.train.train_iters

    @property
    def sample_multiple(self) -> int:
        """Each sample is padded to a multiple of this many tokens, attended padding included."""
        return math.lcm(self.dataset.sample_multiple, self.model.attended_multiple)

    def mock_tokens(self, geometry: MockGeometry) -> int:
        """Tokens of one mock sample, padded to `sample_multiple`."""
        multiple = self.sample_multiple
        tokens = self.model.tokens_of(geometry.frames, geometry.height, geometry.width)
        return -(-tokens // multiple) * multiple

    def optimizer_ranks(self, replicas: int) -> int:
        """Ranks over which one copy of the optimizer state is sharded, of so many model replicas.

        Context ranks have the same weights, so they share the state as well.
        """
        if not self.ddp.use_distributed_optimizer:
            return 1
        return replicas * self.model.context_parallel_size // self.ddp.dp_replicate_size
