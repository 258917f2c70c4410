"""`validation.target`: the loss at which a run ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from dit.train.train_state import TrainState


def compared_loss(values: Mapping[str, Any]) -> float:
    """The loss for best checkpoint and target: val_loss_ema, else val_loss, else infinite."""
    return values.get("val_loss_ema", values.get("val_loss", math.inf))


def reached_line(run: TrainState, values: Mapping[str, Any] | None = None) -> str:
    """A log line: the step of `values`, or if None an earlier checkpoint, reached the target."""
    target = f"validation.target={run.config.validation.target:g}"
    if values is None:
        lowest = run.progress.lowest_val_loss
        return f"{target} was reached before, by a validation loss of {lowest:.4f}: nothing to do"
    return (
        f"{target} is reached at step {values['step']}: a validation loss of"
        f" {compared_loss(values):.4f} after {values['target_samples']:,} samples and"
        f" {timedelta(seconds=round(values['target_s']))} of steps and validations"
    )
