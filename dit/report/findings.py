"""Finds problems of a run, and words each as a warning with a remedy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from dit.progress import counted, first_of
from dit.report.charts import number
from dit.report.lengths import BIN, bins_of
from dit.report.reading import Points, RunRecord, finite
from dit.watching import NotShown

FILL_BOUND = 0.9
"""Mean fill of packs below which a warning is given: padding then costs more than a tenth."""
_ALL = 0.9  # fraction of the empty space above which padding of samples alone explains it
_SPIKE = 12.0  # median absolute deviations; Gaussian noise reaches that once in 10^15 steps
_BEFORE, _AT_ONCE = 100, 20  # 20 steps at a time are compared with the 100 before them
_RISE = 1.1  # ratio of the final validation loss to its lowest value
_SHOWN = 5


def findings(run: RunRecord) -> list[str]:
    """The warnings about a run, including warnings about unreadable files."""
    looks = (_fill, _skipped, _refused, _spikes, _rise)
    return [*run.unreadable, *(text for look in looks for text in look(run))]


def lost_pictures(undrawn: Sequence[NotShown]) -> Iterator[str]:
    """Yields sentences about files that could not be shown; a long list is cut."""
    yield from (
        f"{one.what} cannot be shown and is left out ({one.because})" for one in undrawn[:_SHOWN]
    )
    if len(undrawn) > _SHOWN:
        yield f"and {counted(len(undrawn) - _SHOWN, 'picture')} more"


def _fill(run: RunRecord) -> Iterator[str]:
    fills = [value for _, value in run.points_of_updates("pack_fill")]
    if not fills or (mean := statistics.fmean(fills)) >= FILL_BOUND:
        return
    remedies = [
        "raise dataset.packing_buffer_size, or choose another dataset.task_encoder_seq_length"
    ]
    multiple = run.settings.get("dataset.sample_multiple")
    padding = padding_share(run, multiple) if isinstance(multiple, int) and multiple > 1 else 0.0
    if padding > (1 - mean) / 2:  # padding is most of the empty space
        remedies = [] if padding > _ALL * (1 - mean) else remedies
        remedies.insert(
            0,
            f"every sample is padded to a multiple of dataset.sample_multiple={multiple} tokens,"
            f" so {padding:.1%} of the packed tokens are padding: start a run with a smaller one",
        )
    yield f"packs are {mean:.1%} full, less than {FILL_BOUND:.0%}: {'; '.join(remedies)}"


def padding_share(run: RunRecord, multiple: int) -> float:
    """Fraction of packed tokens that pad samples to a multiple of `multiple` tokens.

    It is estimated from the histogram of the samples' lengths.
    """
    real = padded = 0.0
    for longest, count in bins_of(run).items():
        # Only the ends of a bin are known: its lengths are assumed to be evenly distributed.
        lengths = range(min(longest, int(longest / BIN) + 1), longest + 1)
        real += count * statistics.fmean(lengths)
        padded += count * statistics.fmean(-(-n // multiple) * multiple for n in lengths)
    return 1 - real / padded if padded else 0.0


def _skipped(run: RunRecord) -> Iterator[str]:
    steps = [line["step"] for line in run.lines if line.get("skipped") is True]
    if not run.points("loss"):
        yield (
            "no step has a finite loss: nothing was learned. Look at the samples that"
            " skipped_samples.jsonl names, lower optimizer.lr, or check the latents with"
            " `python -m data_prep inspect`"
        )
    if steps:
        yield (
            f"{counted(len(steps), 'step')} skipped, whose loss or gradient was not finite"
            f" ({first_of(steps, _SHOWN)}): skipped_samples.jsonl names the samples; look at them,"
            " or lower optimizer.lr"
        )


def _refused(run: RunRecord) -> Iterator[str]:
    last = count(run.lines[-1].get("refused"))
    if last:
        why = "".join(f", {n:,} {reason}" for reason, n in refusals(run).items())
        yield (
            f"{counted(int(last), 'sample')} refused{why}: refused_samples.jsonl names them, and"
            " the log of the run has the remedy for each reason"
        )


def refusals(run: RunRecord) -> dict[str, int]:
    """Number of samples that were refused since the start of the run, by reason, largest first."""
    newest = {k: v for line in run.lines for k, v in line.items() if k.startswith("refused_")}
    each = {k.removeprefix("refused_").replace("_", " "): count(v) for k, v in newest.items()}
    found = {reason: number for reason, number in each.items() if number}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _spikes(run: RunRecord) -> Iterator[str]:
    steps = spikes(run.points_of_updates("loss"))
    if steps:
        yield (
            f"the loss jumps at {counted(len(steps), 'step')} ({first_of(steps, _SHOWN)}): if it"
            " does not come back, lower optimizer.lr, or look at the samples of these steps"
        )


def spikes(loss: Points) -> list[int]:
    """Steps whose loss is far above the losses of up to 100 steps before.

    The loss must exceed their median by 12 times their median absolute deviation, and also be above
    1.2 times their median. 20 steps at a time are compared with the steps before them; the first 20
    steps of the run are not compared.
    """
    found = []
    for index in range(_AT_ONCE, len(loss), _AT_ONCE):
        before = [value for _, value in loss[max(0, index - _BEFORE) : index]]
        median = statistics.median(before)
        spread = statistics.median(abs(value - median) for value in before)
        bound = max(median + _SPIKE * spread, 1.2 * median)
        found += [int(step) for step, value in loss[index : index + _AT_ONCE] if value > bound]
    return found


def _rise(run: RunRecord) -> Iterator[str]:
    name = "val_loss_ema" if any("val_loss_ema" in line for line in run.lines) else "val_loss"
    values = run.points(name)
    if not values:
        return
    step, lowest = min(values, key=lambda point: point[1])
    if values[-1][1] > _RISE * lowest > 0:
        yield (
            f"{name} ends at {number(values[-1][1])}, above its lowest {number(lowest)} at step"
            f" {step:.0f}: the model learns its samples by heart, or the learning rate is too high;"
            " use the checkpoint that checkpoints/LOWEST_VAL names, or lower optimizer.lr"
        )


def count(value: Any) -> int:
    """A metric as a number of samples; 0 if `value` is not a number."""
    return int(finite(value) or 0)
