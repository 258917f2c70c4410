"""Metrics that accumulate between two log steps and are read at each, with one all-reduce.

    loss_q10                      training loss: mean over the samples whose noise level is in the
                                  lowest fifth of its distribution; q90 has much noise. The fifths
                                  are those of `validation.quantiles`, as in val_loss_q10
    loss_video, loss_sound        mean error of the tokens of frames, and of those of sound, in
                                  networks with both
    sound_share                   samples with sound, divided by all samples
    student_mean, student_std     mean and deviation of the latents that the student of a
                                  distillation predicts at the end of its own steps (dmd: in all of
                                  them); data_mean, data_std for the data's latents of these samples
    tokens_per_sample             histogram over all ranks since the last log step: [n, count] for
                                  each bin that has samples, which have at most n tokens and, but
                                  for rounding, more than n / 1.09; bins are the same at every step
    tokens_per_sample_mean        mean length of the same samples
    tokens_per_sample_p10, ...    percentiles of these lengths, to within a tenth
    epoch                         samples since the start of the data, divided by the dataset's
    samples_NAME, epoch_NAME      samples and epoch of the dataset NAME of a blend

Norms of weights, gradient and update, from the optimizer's float32 parameters:

    grad_norm_attention, grad_norm_mlp, ...  norms of parts of the model, before clipping; their
                                             squares add up to that of grad_norm
    weight_norm                   norm of all weights
    update_ratio                  norm of the change by the step, divided by weight_norm
    ema_distance                  norm of weights minus EMA, divided by weight_norm

Every weight counts once on every layout: copies on tensor ranks are left out, and copies on data
ranks if the optimizer is not sharded. These metrics only read: training is bit for bit the same
without them, and they never make a step wait for the device.
"""

# N samples of a pack, Q quantile ranges of the noise level
# R ranks
# B bins of the histogram of lengths

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import SOUND, PackedBatch
from dit.config import RunConfig
from dit.data import dataset_sizes
from dit.distributed.process_groups import device
from dit.models.registry import has_sound
from dit.objectives.objective import TrainingObjective
from dit.pack_wire import to_device
from dit.train.metrics.norms import Norms

if TYPE_CHECKING:
    from dit.distributed.model_parallel import Item
    from dit.train.checkpoint.state_dict import TrainProgress
    from dit.train.model_and_optimizer import ModelAndOptimizer
    from dit.train.optimizer.update import Update
    from dit.train.step import PackLoss, RankLoss


class IntervalMetrics:
    """Loss by noise level, norms and lengths of samples; `read` returns them at log steps."""

    def __init__(self, config: RunConfig, model: ModelAndOptimizer, objective: TrainingObjective):
        self.config = config
        self.loss_by_level = LossByNoiseLevel(objective, ranges=config.validation.quantiles)
        self.preferences = Preferences() if config.objective.preference else None
        self.latents = StudentLatents() if config.distill.method is not None else None
        self.streams = StreamLosses() if has_sound(config.model) else None
        self.norms = Norms(model)
        self.data_stats = DataStats(
            capacity=config.dataset.task_encoder_seq_length, sizes=dataset_sizes(config.dataset)
        )

    def is_due(self, step: int) -> bool:
        return step % self.config.logger.log_interval == 0 or step == self.config.train.train_iters

    def before_update(self, step: int) -> None:
        """Copies the weights before the update of `step`, if norms are due at that step."""
        if self.is_due(step):
            self.norms.keep_weights()

    def add_losses(self, items: Sequence[Item], rank_loss: RankLoss) -> None:
        """Adds the losses of a step whose update was not skipped; all ranks call it."""
        self.loss_by_level.add(items, rank_loss.packs)
        if self.preferences is not None:
            self.preferences.add(rank_loss.packs)
        if self.latents is not None:
            self.latents.add(rank_loss.packs)
        if self.streams is not None:
            self.streams.add(rank_loss.packs)

    def add_packs(self, packs: Sequence[PackedBatch]) -> None:
        """Adds the packs that this rank has read for its replica."""
        self.data_stats.add(packs)

    def read(self, progress: TrainProgress, update: Update | None) -> dict[str, Any]:
        """The values since the last log step, over all ranks; empty between log steps.

        All ranks call it. At a log step the sums are reset to 0. `update` is the update of the
        network in this step; None if this step had none.
        """
        if not self.is_due(progress.step):
            return {}
        running = self._running_sums()
        mine = running | (self.norms.take() if update is not None else {})
        flat = _flat(mine)
        dist.all_reduce(flat)
        sums = _by_name(flat, mine)
        for tensor in running.values():
            tensor.zero_()
        values: dict[str, Any] = self.loss_by_level.values(sums)
        if update is not None and not update.skipped:
            values |= self.norms.values(sums, grad_norm=update.grad_norm)
        if self.preferences is not None:
            values |= self.preferences.values(sums)
        if self.latents is not None:
            values |= self.latents.values(sums)
        if self.streams is not None:
            values |= self.streams.values(sums)
        return values | self.data_stats.values(sums, progress)

    def state_dict(self) -> dict[str, Tensor]:
        """The sums of each rank since the last log step, [R, ...]; all ranks call it.

        A checkpoint stores them, so that a resumed run logs the same values as an uninterrupted
        one.
        """
        running = self._running_sums()
        flat = _flat(running)
        of_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, flat)
        rows = _by_name(torch.stack(of_ranks).cpu(), running)
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in rows.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> list[str]:
        """Restores the sums of a `state_dict`; returns the metrics whose shape has changed.

        Tensors are [R, ...] for the R ranks that saved them. With the same number of ranks each
        gets its own sums back, and totals are equal to the bit. With another number the first rank
        gets the totals. Metrics of another shape start at 0.
        """
        running, rank, ranks = self._running_sums(), dist.get_rank(), dist.get_world_size()
        other = {
            name.partition(".")[0]
            for name, of_ranks in state.items()
            if name not in running or of_ranks.shape[1:] != running[name].shape
        }
        for name in (n for n in state if n.partition(".")[0] not in other):
            of_ranks = state[name]
            if len(of_ranks) == ranks:
                running[name].copy_(of_ranks[rank])
            # Saved by another number of ranks: the first rank takes all, so that the total stays.
            elif rank == 0:
                running[name].copy_(of_ranks.sum(0))
        return sorted(other)

    def _running_sums(self) -> dict[str, Tensor]:
        preferences = {} if self.preferences is None else self.preferences.sums
        latents = {} if self.latents is None else self.latents.sums
        streams = {} if self.streams is None else self.streams.sums
        return self.loss_by_level.sums | preferences | latents | streams | self.data_stats.sums


def _flat(parts: Mapping[str, Tensor]) -> Tensor:
    """All tensors, flattened and concatenated in the order of their names."""
    return torch.cat([parts[name].flatten().to(device()) for name in sorted(parts)])


def _by_name(flat: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits `flat` on its last axis into tensors named and shaped like `parts`: undoes `_flat`."""
    names = sorted(parts)
    pieces = flat.split([parts[name].numel() for name in names], dim=-1)
    rows = flat.shape[:-1]
    return {n: x.reshape(*rows, *parts[n].shape) for n, x in zip(names, pieces, strict=True)}


class LossByNoiseLevel:
    """Sums of errors and of their divisors for each quantile range of the noise level."""

    def __init__(self, objective: TrainingObjective, *, ranges: int):
        self.objective = objective
        self.edges = [index / ranges for index in range(1, ranges)]
        self.names = [f"loss_q{100 * middle:.3g}" for middle in quantiles(ranges)]
        self.error_Q, self.count_Q = torch.zeros(2, ranges, dtype=torch.float64, device=device())

    @property
    def sums(self) -> dict[str, Tensor]:
        """The accumulated tensors; the name of each begins with that of its metric."""
        return {"loss_q.error": self.error_Q, "loss_q.count": self.count_Q}

    def add(self, items: Sequence[Item], losses: Sequence[PackLoss]) -> None:
        """Adds the losses of a step; `losses` is empty on ranks that do not compute the loss."""
        for (whole, problem), (loss, part) in zip(items, losses, strict=False):
            range_N = self._range_of(problem.noise_N, whole.latent_tokens)
            error_N, count_N = loss.of_samples(part).unbind(1)
            self.error_Q.index_add_(0, range_N, error_N)
            self.count_Q.index_add_(0, range_N, count_N)

    def _range_of(self, noise_N: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """Index of the quantile range of each sample's noise level; levels rise with quantiles."""
        range_N = torch.zeros(len(num_tokens), dtype=torch.int64, device=noise_N.device)
        for edge in self.edges:
            quantile_N = torch.full((len(num_tokens),), edge, dtype=torch.float64)
            border_N = self.objective.levels(quantile_N, num_tokens)
            range_N += noise_N >= to_device(border_N, noise_N.device)
        return range_N

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean loss of each quantile range that has samples, from the `sums` [Q] of all ranks."""
        errors, counts = sums["loss_q.error"].tolist(), sums["loss_q.count"].tolist()
        rows = zip(self.names, errors, counts, strict=True)
        return {name: error / count for name, error, count in rows if count}


class Preferences:
    """Sums over preference pairs; `add` does not wait for the device."""

    NAMES = ("preference_margin", "preferred_drift", "rejected_drift", "preference_accuracy")
    """Metrics: margin in the sigmoid of the loss; change of the mean error of the preferred and of
    the rejected sample against the network without adapters (negative if it fell); fraction of
    pairs with a margin above 0."""

    def __init__(self) -> None:
        self.total_5 = torch.zeros(5, dtype=torch.float64, device=device())

    @property
    def sums(self) -> dict[str, Tensor]:
        """One accumulated tensor [5]: sums over pairs of each of `NAMES`, and number of pairs."""
        return {"preference.sums": self.total_5}

    def add(self, losses: Sequence[PackLoss]) -> None:
        for loss, _ in losses:
            if loss.pairs_P3 is not None:
                self.total_5[:3] += loss.pairs_P3.sum(0)
                self.total_5[3] += (loss.pairs_P3[:, 0] > 0).sum()
                self.total_5[4] += len(loss.pairs_P3)

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean of each of `NAMES` over pairs, from the `sums` of all ranks; empty without pairs."""
        *totals, pairs = sums["preference.sums"].tolist()
        means = zip(self.NAMES, totals, strict=True)
        return {name: total / pairs for name, total in means} if pairs else {}


class StreamLosses:
    """Errors of tokens of frames and of sound, and the fraction of samples with sound."""

    LEAST = 0.1
    """Fraction of samples with sound below which `silent_corpus` returns a warning."""

    def __init__(self) -> None:
        self.total_32 = torch.zeros(3, 2, dtype=torch.float64, device=device())

    @property
    def sums(self) -> dict[str, Tensor]:
        """One accumulated tensor [3, 2]: numerator and denominator of each metric in `values`.

        The rows are (sum of errors, tokens) of frames, (sum of errors, tokens) of sound, and
        (samples with sound, all samples).
        """
        return {"stream_losses.sums": self.total_32}

    def add(self, losses: Sequence[PackLoss]) -> None:
        for loss, part in losses:
            sound, first = part.others[SOUND], part.share.index == 0  # first context rank
            self.total_32[0] += torch.stack(
                [
                    loss.error_T.double().sum(),
                    to_device(torch.tensor(sum(part.shared_loss_tokens)), device()),
                ]
            )
            self.total_32[1] += loss.of_stream(SOUND, part).sum(0)
            with_sound = sum(tokens > 0 for tokens in sound.latent_tokens)
            counts = torch.tensor([with_sound * first, part.num_samples * first])
            self.total_32[2] += to_device(counts, device())

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """loss_video, loss_sound and sound_share: quotients of the rows of all ranks' `sums`."""
        rows = sums["stream_losses.sums"].tolist()
        names = ("loss_video", "loss_sound", "sound_share")
        return {name: a / b for name, (a, b) in zip(names, rows, strict=True) if b}


def silent_corpus(values: Mapping[str, Any]) -> str | None:
    """A warning if the sound_share in `values` is below `StreamLosses.LEAST`; else None."""
    share = values.get("sound_share")
    if share is None or share >= StreamLosses.LEAST:
        return None
    return (
        f"{share:.1%} of the samples have sound: training on many samples without sound degrades"
        " the sound that the network generates; give datasets with sound more weight in"
        " dataset.blend"
    )


class StudentLatents:
    """Mean and standard deviation of a student's latents, and of the data's."""

    NAMES = ("student", "data")
    DRIFT = 0.2
    """Difference, as a fraction of the data's standard deviation, above which there is a drift."""

    def __init__(self) -> None:
        self.total_23 = torch.zeros(2, 3, dtype=torch.float64, device=device())

    @property
    def sums(self) -> dict[str, Tensor]:
        """One accumulated tensor [2, 3]: (count, sum, sum of squares) for student and data."""
        return {"student_latents.sums": self.total_23}

    def add(self, losses: Sequence[PackLoss]) -> None:
        for loss, _ in losses:
            if loss.made_23 is not None:
                self.total_23 += loss.made_23

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """student_mean, student_std, data_mean and data_std, from the sums [2, 3] of all ranks."""
        found = {}
        for name, (count, total, squares) in zip(
            self.NAMES, sums["student_latents.sums"].tolist(), strict=True
        ):
            if count:
                mean = total / count
                found[f"{name}_mean"] = mean
                found[f"{name}_std"] = math.sqrt(max(0.0, squares / count - mean**2))
        return found


def drift_of(values: Mapping[str, Any]) -> str | None:
    """Phrase on differences between student's and data's latents above `StudentLatents.DRIFT`.

    It compares mean and standard deviation in `values`. The result is None if both are close, or
    not in `values`.
    """
    if "student_std" not in values:
        return None
    std, most = values["data_std"], StudentLatents.DRIFT
    shares = {
        "mean": (values["student_mean"] - values["data_mean"]) / std if std else 0.0,
        "deviation": values["student_std"] / std - 1 if std else 0.0,
    }
    return (
        ", ".join(
            f"{name} {share:+.0%} of the data's deviation"
            for name, share in shares.items()
            if abs(share) > most
        )
        or None
    )


def quantiles(count: int) -> list[float]:
    """Centres of `count` equal parts of (0, 1): quantiles of training's noise levels."""
    return [(index + 0.5) / count for index in range(count)]


Bins = Sequence[tuple[int, int]]  # upper end of a bin in tokens, and number of its samples
_PER_OCTAVE = 8
"""Number of bins of the histogram of lengths between n and 2 n tokens."""
_PERCENTS = (10, 50, 90)


class DataStats:
    """Histogram of the lengths of samples in tokens, on this rank since the last log step."""

    def __init__(self, *, capacity: int, sizes: Mapping[str, int]):
        """Starts an empty histogram for samples of at most `capacity` tokens.

        `sizes` has the number of samples of each dataset by its name in the blend, or by the name
        "" without a blend.
        """
        self.sizes = sizes
        self.names = [name for name in sizes if name]
        bins = math.ceil(_PER_OCTAVE * math.log2(capacity)) + 1
        self.samples_of_length = torch.zeros(bins, dtype=torch.float64)
        self.tokens = torch.zeros(1, dtype=torch.float64)

    @property
    def sums(self) -> dict[str, Tensor]:
        """The accumulated tensors; the name of each begins with that of its metric."""
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
        """Metrics of sample lengths, from the `sums` of all ranks, and epochs, from `progress`."""
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
    """Largest number of tokens of a sample in the bin `index`."""
    return math.floor(2 ** (index / _PER_OCTAVE))


def _percentile(bins: Bins, part: float) -> int:
    """Upper end, in tokens, of the length bin that holds the quantile `part` of all samples."""
    wanted, count = part * sum(count for _, count in bins), 0
    for longest, here in bins:
        count += here
        if count >= wanted:
            return longest
    raise AssertionError("the histogram has no samples")


def edges_and_counts(bins: Bins) -> tuple[list[float], list[int]]:
    """The histogram `bins` with empty bins in its gaps: n + 1 rising edges, and n counts."""
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
