"""What a run leaves on disk and reports while it goes on: checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass

from dit.config.checks import check


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where the run is saved, and what it starts from."""

    save: str | None = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: str | None = None
    """Run folder or checkpoint to continue from, when it holds one; null means `save`."""
    save_interval: int = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: int = 3
    """Newest checkpoints that stay; 0 keeps all."""

    def __post_init__(self) -> None:
        check(
            (self.save_interval >= 1, f"save_interval={self.save_interval} must be at least 1"),
            (self.keep_last >= 0, f"keep_last={self.keep_last} must not be negative"),
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

    def __post_init__(self) -> None:
        check((self.log_interval >= 1, f"log_interval={self.log_interval} must be at least 1"))
