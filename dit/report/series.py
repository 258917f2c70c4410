"""Turns metrics into the curves of a run, and assigns each curve to a chart."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dit.report.reading import Points, RunRecord

_VAL = r"(val_(?:[A-Za-z0-9-]+_)?loss(?:_ema)?)"
_OTHER_SETS = "other validation sets"
_RULES = (  # name of the metric, section, title of the chart, label of the line
    (r"loss", "Loss", "loss", "training"),
    (r"val_loss", "Loss", "loss", "validation"),
    (r"val_loss_ema", "Loss", "loss", "validation, EMA"),
    (r"loss_(q[\d.]+)", "Loss", "training loss by noise level (lowest q: least noise)", r"\1"),
    (r"loss_(video|sound)", "Loss", "training loss of frames and of sound", r"\1"),
    (r"sound_share", "Data", "share of samples with sound", "with sound"),
    (r"preference_margin", "Loss", "margin of preferred samples, in the sigmoid", "margin"),
    (r"preference_accuracy", "Loss", "pairs with a margin above 0", "accuracy"),
    (r"(preferred|rejected)_drift", "Loss", "error minus that without adapters", r"\1"),
    (rf"{_VAL}_(q[\d.]+)", "Validation", r"\1 by noise level (lowest q: least noise)", r"\2"),
    (rf"{_VAL}_(k\d)", "Validation", r"\1 at the fixed levels k / 8", r"\2"),
    (rf"{_VAL}_((?:image|video)\d*_\d+)", "Validation", r"\1 by kind of sample", r"\2"),
    (r"val_([A-Za-z0-9-]+)_loss(_ema)?", "Validation", _OTHER_SETS, r"\1\2"),
    (r"val_(.+)", "Validation", r"\1", r"\1"),
    (r"grad_norm", "Optimisation", "gradient norm", "whole"),
    (r"grad_norm_(\w+)", "Optimisation", "gradient norm by module", r"\1"),
    (r"(lr|lr_lora_B)", "Optimisation", "learning rate", r"\1"),
    (r"weight_norm", "Optimisation", "norm of the weights", "weight_norm"),
    (r"update_ratio", "Optimisation", "update / weights", "update_ratio"),
    (r"ema_distance", "Optimisation", "distance of the EMA / weights", "ema_distance"),
    (r"tokens_per_s", "Speed and memory", "tokens per second", "all devices"),
    (r"samples_per_s", "Speed and memory", "samples per second", "all devices"),
    (r"mfu", "Speed and memory", "model FLOP utilisation", "mfu"),
    (r"model_tflops", "Speed and memory", "model TFLOP/s of a device", "model_tflops"),
    (r"(\w*memory\w*)", "Speed and memory", "memory", r"\1"),
    (r"(validation|sampling)_s", "Speed and memory", "seconds of a validation", r"\1"),
    (r"(\w+)_s", "Speed and memory", "seconds of a step", r"\1"),
    (r"pack_fill", "Data", "fill of packs", "fill"),
    (r"refused(?:_(\w+))?", "Data", "samples refused so far", r"\g<0>"),
    (r"epoch", "Data", "epochs", "epoch"),
    (r"epoch_(.+)", "Data", "epochs by dataset", r"\1"),
    (r"samples_(.+)", "Data", "samples by dataset", r"\1"),
    (r"tokens_per_sample_(\w+)", "Data", "tokens of a sample", r"\1"),
    (r"skipped_steps", "Optimisation", "steps skipped so far", "skipped_steps"),
    (r"(?s:(.*))", "Other", r"\1", r"\1"),  # (?s: because a name may contain a line feed
)
_UNSHOWN = {"step", "skipped", "consumed_samples", "real_tokens"}
_ORDER = ("Loss", "Validation", "Optimisation", "Speed and memory", "Data", "Other")
BUCKETS = 150
"""Number of points of a curve that a chart of this size can show."""


@dataclass(frozen=True, order=True, slots=True)
class ChartPlace:
    """Section and chart in which a metric is drawn, and the label of its curve."""

    section: int
    title: str
    label: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Mean and range of adjacent points of a curve."""

    step: float
    mean: float
    low: float
    high: float


def chart_place(name: str) -> ChartPlace:
    """Section, chart and label of the metric `name`; a metric without a rule gets its own chart."""
    for pattern, section, title, label in _RULES:
        if match := re.fullmatch(pattern, name):
            return ChartPlace(_ORDER.index(section), match.expand(title), match.expand(label))
    raise AssertionError(name)


def is_loss(title: str) -> bool:
    """Whether the chart `title` shows losses, which are comparable only between some runs."""
    return "loss" in title or title == _OTHER_SETS


def section_name(index: int) -> str:
    return _ORDER[index]


def curves(run: RunRecord) -> dict[ChartPlace, Points]:
    """The curves of a run, in the order of the page.

    Metrics that are always 0 are left out, and so are the metrics in `_UNSHOWN`.
    """
    found = {chart_place(name): of for name, of in run.series.items() if name not in _UNSHOWN}
    return {
        at: found[at]
        for at in sorted(found, key=_in_order)
        if any(value for _, value in found[at])  # a count that stays 0 needs no curve
    }


def _in_order(at: ChartPlace) -> tuple[int, tuple[int, str], tuple[int, str]]:
    # Shorter names come first, so that q5 stands before q10 and the plain loss before all others.
    return at.section, (len(at.title), at.title), (len(at.label), at.label)


def buckets(of: Points, *, most: int = BUCKETS) -> list[Bucket]:
    """A curve in at most `most` buckets of adjacent points, each with mean and extremes.

    All buckets have the same number of points, except perhaps the last.
    """
    size = math.ceil(len(of) / most)
    parts = [of[first : first + size] for first in range(0, len(of), max(size, 1))]
    return [_bucket(part) for part in parts]


def _bucket(part: Points) -> Bucket:
    steps, values = zip(*part, strict=True)
    low, high = min(values), max(values)
    # Rounding must not make the mean of constant values differ from them.
    mean = min(max(sum(values) / len(values), low), high)
    return Bucket(step=sum(steps) / len(steps), mean=mean, low=low, high=high)
