"""What a run writes: checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dit.config.checks import at_least_one, check, numbers


class Weights(StrEnum):
    """Which weights of a checkpoint: the trained ones, or their average (EMA)."""

    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where checkpoints are saved, and from which checkpoint the run starts."""

    save: str | None = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: str | None = None
    """Run folder or checkpoint to continue from, if there is one in it; null means `save`."""
    load_data_position: bool = True
    """Continue the data where the checkpoint left them; false starts them anew, once (new data)."""
    save_interval: int = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: int = 3
    """Newest checkpoints to keep, beside the one of lowest validation loss; 0 keeps all."""
    async_save: bool = False
    """Write in the background; the run waits only for the copy to host memory."""
    also_save_hf: bool = False
    """Export each checkpoint for Hugging Face Diffusers as well, to `diffusers` in `save`."""
    finetune: bool = False
    """Take only the weights from `load`, and start a new run in `save` at step 0."""
    finetune_weights: Weights = Weights.MODEL
    """Which weights `finetune` takes: the trained ones (model), or their average (ema)."""

    def __post_init__(self) -> None:
        check(
            (self.save_interval >= 1, f"save_interval={self.save_interval} must be at least 1"),
            (self.keep_last >= 0, f"keep_last={self.keep_last} must not be negative"),
            (
                not self.also_save_hf or self.save is not None,
                "also_save_hf=true exports into save, which is null; set checkpoint.save",
            ),
            (
                not self.finetune or (self.load is not None and self.load != self.save),
                f"finetune=true takes weights from load={self.load} into a new run in"
                f" save={self.save}; set both, to different folders",
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

    log_interval: int = 10
    """Steps between lines in the terminal, TensorBoard and W&B; metrics.jsonl has every step."""
    tensorboard_dir: str | None = None
    """Null is `tensorboard` in the run folder."""
    wandb_project: str | None = None
    """Project in W&B; null does not log there."""
    wandb_exp_name: str | None = None
    """Name of the run in W&B; null is the name of the run folder."""
    wandb_entity: str | None = None
    """User or team in W&B; null is the account's own."""
    wandb_mode: WandbMode | None = None
    """online, offline (kept in the run folder), or disabled; null is $WANDB_MODE, else online."""

    def __post_init__(self) -> None:
        check(*at_least_one(self, "log_interval"), *numbers(self))
