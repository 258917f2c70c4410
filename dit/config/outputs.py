"""What a run leaves on disk and reports while it goes on: checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dit.config.checks import at_least_one, check, numbers
from dit.config.choices import WandbMode


class Weights(StrEnum):
    """Which weights of a checkpoint: those that the optimizer left, or their average."""

    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where the run is saved, and what it starts from."""

    save: str | None = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: str | None = None
    """Run folder or checkpoint to continue from, when it holds one; null means `save`."""
    load_data_position: bool = True
    """Whether the data go on where they stood; false begins them anew, once, as other data need."""
    save_interval: int = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: int = 3
    """Newest checkpoints that stay, and the one of lowest validation loss; 0 keeps all."""
    async_save: bool = False
    """Write in the background: the run waits only until everything is copied to host memory."""
    also_save_hf: bool = False
    """Export each checkpoint for Hugging Face Diffusers as well, to `diffusers` in `save`."""
    finetune: bool = False
    """Take nothing but the weights from `load`, and begin a new run in `save` at step 0."""
    finetune_weights: Weights = Weights.MODEL
    """What `finetune` takes: the weights that were trained (model), or their average (ema)."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """What is written down while the run goes on."""

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
