"""Metrics of every step: sums over all ranks of the run.

RUN/skipped_samples.jsonl has one JSON object for each step whose loss or gradient was not finite:

    step      number of the step
    because   "loss", or "gradient" if the loss was finite
    keys      keys of the samples whose own loss was not finite, or of all samples of the step if
              only the gradient was not finite
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.distributed.process_groups import device
from dit.models.registry import network_spec
from dit.pack_wire import to_device
from dit.progress import counted, first_of
from dit.sizing.flops import training_flops
from dit.train.timers import COMMUNICATION, timed

if TYPE_CHECKING:
    from dit.train.reference_passes import References
    from dit.train.step import RankLoss
    from dit.train.train_state import TrainState

SKIPPED_FILE = "skipped_samples.jsonl"
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCounts:
    """Counts over the packs that a rank reads for its replica; zeros on ranks that read none."""

    samples: float = 0  # as stored in shards: a preference pair is one
    tokens: float = 0
    filled: float = 0  # used part of the packs' capacity, in tokens
    refused: float = 0  # since the start of the run
    flops: float = 0
    of_datasets: Mapping[str, int] = field(default_factory=dict)  # samples, by dataset of a blend


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics(PackCounts):
    """Sums of a step over one rank, or over all ranks."""

    stops: float  # ranks that have received a signal to stop
    writing: float  # ranks that still write a checkpoint
    error: float
    count: float  # divisor of `error`
    squared_norm: float  # of the whole gradient, before clipping

    @property
    def loss(self) -> float:
        return self.error / self.count

    @property
    def grad_norm(self) -> float:
        return self.squared_norm**0.5


def sum_step_metrics(
    run: TrainState, counts: PackCounts, rank_loss: RankLoss, squared_norm: Tensor, *, stop: bool
) -> StepMetrics:
    """Sums the values of a step over all ranks, in one all-reduce; all ranks get the same.

    Values on the device are summed in the same all-reduce, so that the host waits for the device
    once in each step. `squared_norm` [1] is equal on all ranks, so only the first rank's is added.
    `stop` says whether this rank has received a signal to stop.
    """
    mine = asdict(counts) | {
        "stops": float(stop),
        "writing": float(run.saver is not None and run.saver.writing),
    }
    norm = squared_norm if dist.get_rank() == 0 else torch.zeros_like(squared_norm)
    return over_ranks(mine, torch.cat([rank_loss.sums, norm]))


def count_packs(
    run: TrainState, packs: Sequence[PackedBatch], references: References | None
) -> PackCounts:
    """Counts over the `packs` of a step; FLOPs include the passes of `references`."""
    names = run.interval_metrics.data_stats.names
    model = run.config.model.at_step(run.progress.step + 1)
    before = 0 if references is None else references.flops
    if run.loader is None:
        return PackCounts(of_datasets=samples_of_datasets((), names))
    return PackCounts(
        of_datasets=samples_of_datasets(packs, names),
        samples=sum(len(pack.samples_read) for pack in packs),
        tokens=sum(stream.real_tokens for pack in packs for stream in pack.streams.values()),
        filled=sum(taken_tokens(model, pack) for pack in packs),
        refused=sum(run.loader.counts().values()),
        flops=before + sum(training_flops(model, pack) for pack in packs),
    )


def taken_tokens(model: ModelConfig, pack: PackedBatch) -> int:
    """Number of tokens of `pack` that attention computes, including padding that it computes.

    Text tokens count if latents and text attend to each other.
    """
    latents = sum(model.attended_in(pack)) + sum(s.real_tokens for s in pack.others.values())
    if not network_spec(model).attends_jointly:
        return latents
    multiple = model.text_multiple
    return latents + sum(-(-rows // multiple) * multiple for rows in pack.text_rows)


def samples_of_datasets(packs: Iterable[PackedBatch], names: Sequence[str]) -> dict[str, int]:
    """Number of samples in `packs` from each dataset of a blend, by the prefix of their keys."""
    keys = (pack.keys[sample] for pack in packs for sample in pack.samples_read)
    found = Counter(key.partition("/")[0] for key in keys)
    return {name: found[name] for name in names}


ON_DEVICE = ("error", "count", "squared_norm")


def over_ranks(mine: Mapping[str, Any], on_device: Tensor) -> StepMetrics:
    """Sums the metrics `mine` of all ranks, by name, in one all-reduce.

    `on_device` has the values of ON_DEVICE, float64 [3].
    """
    numbers = dict(mine)
    datasets = numbers.pop("of_datasets")
    # A dataset may be named like one of the other numbers.
    prefix = "dataset "
    numbers |= {f"{prefix}{name}": n for name, n in datasets.items()}
    total = sum_over_ranks(numbers, dict(zip(ON_DEVICE, on_device.split(1), strict=True)))
    of_datasets = {name: int(total.pop(f"{prefix}{name}")) for name in datasets}
    return StepMetrics(**total, of_datasets=of_datasets)


def sum_over_ranks(
    numbers: Mapping[str, float], on_device: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """The sum of each number over all ranks of the run, in float64; the host waits for it once.

    `on_device` has tensors [1] that are still on the device. All ranks pass the same names, in any
    order.
    """
    names, there = sorted(numbers), on_device or {}
    mine = torch.tensor([numbers[n] for n in names], dtype=torch.float64)
    total = torch.cat([to_device(mine, device()), *(there[name] for name in sorted(there))])
    with timed(COMMUNICATION):
        dist.all_reduce(total)
        return dict(zip([*names, *sorted(there)], total.tolist(), strict=True))


def step_values(
    run: TrainState, sums: StepMetrics, *, seconds: dict[str, float], skipped: bool
) -> dict[str, Any]:
    """Metrics of a step except losses and norms; writers.py explains each."""
    step_s, peak = seconds["step_time"], peak_tflops()
    tflops = sums.flops / step_s / dist.get_world_size() / 1e12
    batch, capacity = run.config.train.global_batch_size, run.config.dataset.task_encoder_seq_length
    return {
        "step": run.progress.step,
        "consumed_samples": run.progress.consumed_samples,
        "real_tokens": int(sums.tokens),
        "pack_fill": sums.filled / (batch * capacity),
        "refused": int(sums.refused),
        **{f"{part}_s": value for part, value in seconds.items()},
        "tokens_per_s": sums.tokens / step_s,
        "samples_per_s": sums.samples / step_s,
        "model_tflops": tflops,
        **({} if peak is None else {"mfu": tflops / peak}),
        "peak_memory_gb": peak_memory_gb(),
        "skipped": skipped,
        "skipped_steps": run.progress.skipped_steps,
    }


@cache
def peak_tflops() -> float | None:
    """Peak bfloat16 TFLOP/s of this device by its data sheet; None for unknown devices."""
    if not torch.cuda.is_available():
        return None
    from dit.device_specs import peak_flops

    flops = peak_flops(torch.cuda.get_device_name())
    return None if flops is None else flops / 1e12


def peak_memory_gb() -> float:
    """Peak memory since the start in GB: tensors on a GPU, or without GPU the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStep:
    """A step without update, because its loss or gradient was not finite."""

    step: int
    because: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        count, shown = len(self.keys), first_of(self.keys, _SHOWN)
        whose = "of" if self.because == "loss" else "of a step with"
        return f"{self.because} {whose} {counted(count, 'sample')} is not finite: {shown}"


def gather_skipped_step(
    step: int, *, loss: float, not_finite: Sequence[str], present: Sequence[str]
) -> SkippedStep:
    """Gathers the samples of a skipped step from all ranks. Collective.

    `not_finite` has the keys of samples whose loss is not finite on this rank, `present` the keys
    of all samples that this rank has read for the step.
    """
    gathered: list[tuple[Sequence[str], Sequence[str]]] = [((), ())] * dist.get_world_size()
    dist.all_gather_object(gathered, (not_finite, present))
    # Context ranks have parts of the same samples: each key counts once.
    known = [
        dict.fromkeys(key for part in parts for key in part)
        for parts in zip(*gathered, strict=True)
    ]
    return SkippedStep(
        step=step,
        because="gradient" if math.isfinite(loss) else "loss",
        keys=tuple(known[0] or known[1]),
    )
