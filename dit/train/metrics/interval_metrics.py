"""What is measured between two log steps and read at each: one all-reduce for all of it.

It only reads. Training is bit for bit that of a run without it, and no step waits for the device on
its account.
"""

# N samples of a pack, Q parts of the density of the levels
# N samples of a pack

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import dataset_sizes
from dit.distributed.process_groups import device
from dit.objectives import Objective
from dit.train.metrics.norms import Norms

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer
    from dit.train.optimizer import Update
    from dit.train.step import Item, PackLoss, RankLoss
    from dit.train.train_state import TrainProgress


class IntervalMetrics:
    """Loss by noise level, norms, and samples seen; `read` has their values at log steps."""

    def __init__(self, config: RunConfig, learner: ModelAndOptimizer, objective: Objective):
        self.config = config
        self.by_level = LossByLevel(objective, parts=config.validation.quantiles)
        self.norms = Norms(learner)
        self.seen = DataStats(
            capacity=config.dataset.task_encoder_seq_length, sizes=dataset_sizes(config)
        )

    def is_due(self, step: int) -> bool:
        return step % self.config.logger.log_interval == 0 or step == self.config.train.train_iters

    def before_update(self, step: int) -> None:
        """Between gradient and update of a step."""
        if self.is_due(step):
            self.norms.keep()

    def add(self, items: Sequence[Item], report: RankLoss) -> None:
        """Takes in the packs of a step that was not skipped, on all ranks."""
        self.by_level.add(items, report.measured)

    def saw(self, packs: Sequence[PackedBatch]) -> None:
        """Takes in the packs that this rank has read for its replica."""
        self.seen.add(packs)

    def read(self, progress: TrainProgress, done: Update) -> dict[str, Any]:
        """The values over all ranks since the last log step; nothing between log steps."""
        if not self.is_due(progress.step):
            return {}
        running = self._running()
        sums = _over_ranks(running | self.norms.take())
        for mine in running.values():
            mine.zero_()
        values: dict[str, Any] = self.by_level.values(sums)
        if not done.skipped:
            values |= self.norms.values(sums, grad_norm=done.grad_norm)
        return values | self.seen.values(sums, progress)

    def interval(self) -> dict[str, Tensor]:
        """What each rank has added up since the last log step, [ranks, ...]; all ranks call it.

        A checkpoint keeps it, so that a run that goes on writes what one that never stopped does.
        """
        running = self._running()
        flat = _flat(running)
        of_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, flat)
        rows = _by_name(torch.stack(of_ranks).cpu(), running)
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in rows.items()}

    def go_on(self, interval: Mapping[str, Tensor]) -> list[str]:
        """Continues an `interval`; returns the metrics that cannot, as they have other parts now.

        With as many ranks as then each has its own share again, and sums are the same to the bit.
        """
        running, rank, ranks = self._running(), dist.get_rank(), dist.get_world_size()
        other = {
            name.partition(".")[0]
            for name, of_ranks in interval.items()
            if name not in running or of_ranks.shape[1:] != running[name].shape
        }
        for name in (n for n in interval if n.partition(".")[0] not in other):
            of_ranks = interval[name]
            if len(of_ranks) == ranks:
                running[name].copy_(of_ranks[rank])
            elif rank == 0:
                running[name].copy_(of_ranks.sum(0))
        return sorted(other)

    def _running(self) -> dict[str, Tensor]:
        return self.by_level.sums | self.seen.sums


def _over_ranks(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum of each over all ranks; all have the same names."""
    flat = _flat(mine)
    dist.all_reduce(flat)
    return _by_name(flat, mine)


def _flat(parts: Mapping[str, Tensor]) -> Tensor:
    """All parts end to end, in the order of their names."""
    return torch.cat([parts[name].flatten().to(device()) for name in sorted(parts)])


def _by_name(flat: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_flat`, of the last axis."""
    names = sorted(parts)
    pieces = flat.split([parts[name].numel() for name in names], dim=-1)
    rows = flat.shape[:-1]
    return {n: x.reshape(*rows, *parts[n].shape) for n, x in zip(names, pieces, strict=True)}


class LossByLevel:
    """Errors and what they are divided by, for each part; nothing here waits for the device."""

    def __init__(self, objective: Objective, *, parts: int):
        self.objective = objective
        self.edges = [index / parts for index in range(1, parts)]
        self.names = [f"loss_q{100 * middle:.3g}" for middle in quantiles(parts)]
        self.error_Q, self.count_Q = torch.zeros(2, parts, dtype=torch.float64, device=device())

    @property
    def sums(self) -> dict[str, Tensor]:
        """What is added up, by the metric that it makes."""
        return {"loss_q.error": self.error_Q, "loss_q.count": self.count_Q}

    def add(self, items: Sequence[Item], losses: Sequence[PackLoss]) -> None:
        """Takes the packs of a step in; `losses` are empty on ranks that count none."""
        for (whole, problem), (loss, part) in zip(items, losses, strict=False):
            part_N = self._part_of(problem.noise_N, whole.num_tokens)
            error_N, count_N = loss.of_samples(part).unbind(1)
            self.error_Q.index_add_(0, part_N, error_N)
            self.count_Q.index_add_(0, part_N, count_N)

    def _part_of(self, noise_N: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """Part that each sample's level is in; levels rise with their quantiles."""
        part_N = torch.zeros(len(num_tokens), dtype=torch.int64, device=noise_N.device)
        for edge in self.edges:
            quantile_N = torch.full((len(num_tokens),), edge, dtype=torch.float64)
            border_N = self.objective.levels(quantile_N, num_tokens)
            part_N += noise_N >= border_N.to(noise_N.device, non_blocking=True)
        return part_N

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Means from the sums of all ranks; a part that no sample was in has none."""
        errors, counts = sums["loss_q.error"].tolist(), sums["loss_q.count"].tolist()
        rows = zip(self.names, errors, counts, strict=True)
        return {name: error / count for name, error, count in rows if count}


def quantiles(count: int) -> list[float]:
    """The middles of `count` equal parts of (0, 1): together they weigh levels as training does."""
    return [(index + 0.5) / count for index in range(count)]


Bins = Sequence[tuple[int, int]]  # the longest sample that a bin may have, and how many it has
_PER_OCTAVE = 8
"""Bins of the histogram of lengths between n and 2 n tokens."""
_PERCENTS = (10, 50, 90)


class DataStats:
    """Counts of this rank since the last log step: a histogram of lengths, and tokens."""

    def __init__(self, *, capacity: int, sizes: Mapping[str, int]):
        """`sizes` has the samples of each dataset by the prefix of its keys; "" alone has none."""
        self.sizes = sizes
        self.names = [name for name in sizes if name]
        bins = math.ceil(_PER_OCTAVE * math.log2(capacity)) + 1
        self.samples_of_length = torch.zeros(bins, dtype=torch.float64)
        self.tokens = torch.zeros(1, dtype=torch.float64)

    @property
    def sums(self) -> dict[str, Tensor]:
        """What is added up, by the metric that it makes."""
        return {
            "tokens_per_sample.samples": self.samples_of_length,
            "tokens_per_sample.tokens": self.tokens,
        }

    def add(self, packs: Sequence[PackedBatch]) -> None:
        for pack in packs:
            for tokens in pack.num_tokens:
                self.samples_of_length[math.ceil(_PER_OCTAVE * math.log2(tokens))] += 1
            self.tokens += sum(pack.num_tokens)

    def values(self, sums: Mapping[str, Tensor], progress: TrainProgress) -> dict[str, Any]:
        """The numbers of the module's page from the sums of all ranks."""
        histogram = sums["tokens_per_sample.samples"].tolist()
        tokens = float(sums["tokens_per_sample.tokens"])
        values: dict[str, Any] = {}
        bins = [(_longest(i), int(count)) for i, count in enumerate(histogram) if count]
        if bins:
            values["tokens_per_sample"] = bins
            values["tokens_per_sample_mean"] = tokens / sum(histogram)
            for percent in _PERCENTS:
                values[f"tokens_per_sample_p{percent}"] = float(_percentile(bins, percent / 100))
        for name in self.names:
            taken = progress.of_datasets.get(name, 0)
            values |= {f"samples_{name}": taken, f"epoch_{name}": taken / self.sizes[name]}
        if set(self.sizes) == {""}:
            taken = progress.consumed_samples - progress.samples_before
            values["epoch"] = taken / self.sizes[""]
        return values


def _longest(index: int) -> int:
    """Tokens of the longest sample that a bin may have."""
    return math.floor(2 ** (index / _PER_OCTAVE))


def _percentile(bins: Bins, part: float) -> int:
    """The upper end of the bin in which the smallest `part` of the samples ends."""
    wanted, count = part * sum(count for _, count in bins), 0
    for longest, here in bins:
        count += here
        if count >= wanted:
            return longest
    raise AssertionError("an empty histogram")


def edges_and_counts(bins: Bins) -> tuple[list[float], list[int]]:
    """Bins side by side, with empty ones in the gaps: n + 1 rising edges of n counts."""
    edges: list[float] = []
    counts: list[int] = []
    for longest, count in bins:
        shorter = longest / 2 ** (1 / _PER_OCTAVE)
        if not edges:
            edges.append(shorter)
        elif shorter > edges[-1]:
            edges.append(shorter)
            counts.append(0)
        edges.append(float(longest))
        counts.append(count)
    return edges, counts
