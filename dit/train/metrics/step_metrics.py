"""The numbers of a step, over all ranks of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from dit.batch import PackedBatch
from dit.models.cost import training_flops
from dit.train.metrics.data_stats import of_datasets
from dit.train.metrics.device import peak_memory_gb, peak_tflops
from dit.train.step import RankLoss, Update, sum_over_ranks
from dit.train.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of the packs that a rank reads for its replica; zeros on the others."""

    samples: float = 0
    tokens: float = 0
    refused: float = 0  # since the start of the run
    flops: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics(Counts):
    """Of a step, over all ranks."""

    error: float
    count: float  # what `error` is to be divided by
    stops: float  # ranks that a signal asks to stop
    writing: float  # ranks that still write a checkpoint
    of_datasets: Mapping[str, int]  # samples of each dataset of a blend

    @property
    def loss(self) -> float:
        return self.error / self.count


def sum_step_metrics(
    run: TrainState, packs: Sequence[PackedBatch], report: RankLoss, *, stop: bool
) -> StepMetrics:
    """Adds up what the ranks know of a step: one all-reduce, after which all decide alike."""
    mine = StepMetrics(
        **asdict(_counts(run, packs)),
        error=report.total,
        count=report.count,
        stops=float(stop),
        writing=float(run.saver is not None and run.saver.writing),
        of_datasets=of_datasets(packs if run.loader is not None else (), run.gauges.seen.names),
    )
    return over_ranks(mine)


def over_ranks(mine: StepMetrics) -> StepMetrics:
    """The sums of all ranks from those of each: one all-reduce, every number by its name."""
    numbers = asdict(mine)
    datasets = numbers.pop("of_datasets")
    prefix = "dataset "
    total = sum_over_ranks(numbers | {f"{prefix}{name}": n for name, n in datasets.items()})
    summed = {name: int(total[f"{prefix}{name}"]) for name in datasets}
    return StepMetrics(**{name: total[name] for name in numbers}, of_datasets=summed)


def values_of(
    run: TrainState, sums: StepMetrics, done: Update, *, rate: float, seconds: dict[str, float]
) -> dict[str, Any]:
    """What is written down of a step; metrics.py says what each means."""
    step_s, peak = seconds["step_time"], peak_tflops()
    tflops = sums.flops / step_s / dist.get_world_size() / 1e12
    batch, capacity = run.config.train.global_batch_size, run.config.dataset.task_encoder_seq_length
    return {
        "step": run.progress.step,
        "loss": sums.loss,
        "grad_norm": done.grad_norm,
        "lr": rate,
        "consumed_samples": run.progress.consumed_samples,
        "real_tokens": int(sums.tokens),
        "pack_fill": sums.tokens / (batch * capacity),
        "refused": int(sums.refused),
        **{f"{part}_s": value for part, value in seconds.items()},
        "tokens_per_s": sums.tokens / step_s,
        "samples_per_s": sums.samples / step_s,
        "model_tflops": tflops,
        **({} if peak is None else {"mfu": tflops / peak}),
        "peak_memory_gb": peak_memory_gb(),
        "skipped": done.skipped,
        "skipped_steps": run.progress.skipped_steps,
    }


def _counts(run: TrainState, packs: Sequence[PackedBatch]) -> Counts:
    if run.loader is None:
        return Counts()
    return Counts(
        samples=sum(pack.num_samples for pack in packs),
        tokens=sum(pack.real_tokens for pack in packs),
        refused=sum(run.loader.counts().values()),
        flops=sum(training_flops(run.config.model, pack) for pack in packs),
    )
