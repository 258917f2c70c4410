"""A round of validation: held-out losses, then samples and their quality."""

from __future__ import annotations

import time
from typing import Any

from dit.train.sampling import draw_samples
from dit.train.train_state import DrawnSamples, TrainState
from dit.train.validation import validate


def validation_round(run: TrainState) -> tuple[dict[str, Any], DrawnSamples | None]:
    """What is written down of this step's round, with its seconds; the first rank gets samples."""
    began = time.perf_counter()
    found: dict[str, Any] = _losses(run)
    validated = time.perf_counter()
    drawn = draw_samples(run)
    if run.validation:
        found |= {"validation_s": validated - began}
    if run.samples is not None:
        found |= {"sampling_s": time.perf_counter() - validated}
    return found | (drawn.quality if drawn else {}), drawn


def _losses(run: TrainState) -> dict[str, float]:
    """Of the run's own held-out packs, and of each named set."""
    losses = {}
    for name, packs in run.validation.items():
        losses |= validate(
            run.learner, packs.packs, objective=run.objective, config=run.config, name=name
        )
    return losses
