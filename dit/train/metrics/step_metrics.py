"""Where the seconds of a step go: parts say when they begin and end, the step reads the sums.

A part inside another is taken out of the outer one, so that no second counts twice. On a GPU the
host runs ahead of the device: then parts are timed only where `precisely` was called, by waiting
for the device, which a run that is not a measurement should not do.
"""

# T packed tokens, N samples, C patch features

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch
from dit.distributed.device_specs import peak_flops
from dit.distributed.process_groups import device
from dit.models.dit.pack_flops import training_flops

if TYPE_CHECKING:
    from dit.train.optimizer import Update
    from dit.train.step import RankLoss
    from dit.train.train_state import TrainState


DATA, FORWARD, BACKWARD = "data", "forward", "backward"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
_spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
_inner = [0.0]  # seconds of the parts inside each part that is under way
_precise = False


def precisely() -> None:
    """From now on the device is waited for at the ends of all parts."""
    global _precise
    _precise = True


@contextmanager
def timing(part: str) -> Iterator[None]:
    """Inside, seconds belong to `part`."""
    began = _now()
    _inner.append(0.0)
    try:
        yield
    finally:
        seconds = _now() - began
        _spent[part] += seconds - _inner.pop()
        _inner[-1] += seconds


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose seconds belong to `part`."""

    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with timing(part):
            return function(*args, **kwargs)

    return inside


def spent() -> dict[str, float]:
    """Seconds of each part since the last call; nothing where they would not be true."""
    taken = dict(_spent)
    _spent.update(dict.fromkeys(PARTS, 0.0))
    return taken if _precise or not torch.cuda.is_available() else {}


def _now() -> float:
    if _precise and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def peak_tflops() -> float | None:
    """TFLOP/s that its data sheet promises for bfloat16; None for what the table has not got."""
    flops = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if flops is None else flops / 1e12


def peak_memory_gb() -> float:
    """Since the start: on a GPU what torch has allocated, else the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


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


def sum_over_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """The sum of each number over all ranks of the run, in float64.

    All ranks have the same names, in whatever order.
    """
    names = sorted(numbers)
    total = torch.tensor([numbers[n] for n in names], dtype=torch.float64, device=device())
    with timing(COMMUNICATION):
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))


def of_datasets(packs: Iterable[PackedBatch], names: Sequence[str]) -> dict[str, int]:
    """Samples of each dataset of a blend, whose name begins their keys."""
    found = Counter(key.partition("/")[0] for pack in packs for key in pack.keys)
    return {name: found[name] for name in names}


SKIPPED_FILE = "skipped_samples.jsonl"
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A step that changed nothing."""

    step: int
    because: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        count, shown = len(self.keys), ", ".join(self.keys[:_SHOWN])
        more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        whose = "of" if self.because == "loss" else "of a step with"
        samples = "1 sample" if count == 1 else f"{count} samples"
        return f"{self.because} {whose} {samples} is not finite: {shown}{more}"


def skip(step: int, *, loss: float, bad: Sequence[str], present: Sequence[str]) -> Skip:
    """The record of a skipped step; collective.

    `bad` are the keys of samples whose loss is not finite on this rank, `present` those of all
    samples that it has read for the step.
    """
    gathered: list[tuple[Sequence[str], Sequence[str]]] = [((), ())] * dist.get_world_size()
    dist.all_gather_object(gathered, (bad, present))
    # Context ranks have parts of the same samples.
    known = [
        dict.fromkeys(key for keys in kind for key in keys) for kind in zip(*gathered, strict=True)
    ]
    return Skip(
        step=step,
        because="gradient" if math.isfinite(loss) else "loss",
        keys=tuple(known[0] or known[1]),
    )
