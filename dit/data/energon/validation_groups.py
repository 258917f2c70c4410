"""The fixed list of validation packs, of which every rank reads only its own.

1. ValidationGroups.plan    on one rank: groups of samples that share a pack, from their heads
2. ValidationGroups.read    on the rank that evaluates a pack: the samples of its group
3. ValidationPlan.packs     the packs with the refusals of all ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from megatron.energon.flavors.base_dataset import SavableDataset

from dit.batch import FixedLevels, PackedBatch
from dit.config import RunConfig
from dit.data.datasets import DatasetSplit
from dit.data.energon.internals import in_this_process
from dit.data.energon.stages import SampleGroup
from dit.data.energon.task_encoder import open_validation
from dit.data.rejections import Bound, DataError, RefusedSample, RejectCounts
from dit.models.pass_work import PassWork
from dit.stored_samples import LEVELS, uneven_levels


class PlannedGroup(NamedTuple):
    """Validation samples that share a pack, with their sizes and noise levels."""

    key: tuple[Any, ...]
    """Position in the data: Energon's restore key of the group."""
    sizes: tuple[tuple[int, int], ...]
    """(latent tokens, text tokens) of each sample."""
    levels: tuple[int, ...]
    """Index k of each sample's fixed noise level: from its shard, else its position modulo 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPacks:
    """Validation packs of a rank, held in memory for the whole run."""

    packs: list[PackedBatch]
    counts: RejectCounts
    """Counts of read and refused samples over the whole list of packs."""
    refused: tuple[RefusedSample, ...] = ()
    samples: int = 0
    """Number of samples in the whole list of packs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPlan:
    """The samples of each validation pack, and samples refused when their lengths were read."""

    groups: list[PlannedGroup]
    counts: RejectCounts
    refused: tuple[RefusedSample, ...]
    bound: Bound
    needs_all: bool
    """Whether fixed noise levels would no longer be even without any one of the samples."""

    def of(self, indices: Iterable[int]) -> list[PlannedGroup]:
        """The groups at `indices` of the list, which begins again after its end."""
        return [self.groups[index % len(self.groups)] for index in indices]

    def packs(self, packs: list[PackedBatch], *, late: Iterable[RefusedSample]) -> ValidationPacks:
        """ValidationPacks of one rank: its own `packs`, with the counts and refusals of all ranks.

        `late` are the samples that any rank refused while reading packs.

        Raises:
            DataError: too many samples were refused, or a sample without which the fixed levels are
                uneven.
        """
        # Two ranks may have read the same pack, where the list is short.
        late, counts = tuple(dict.fromkeys(late)), self.counts.copied()
        if late and self.needs_all:
            raise DataError(
                f"{late[0].place}: {late[0].reason} ({late[0].detail}). Without this sample the"
                " noise levels of validation.fixed_levels=true are uneven; restore the sample, or"
                " set validation.fixed_levels=false"
            )
        for sample in late:
            counts.refuse(sample)
        with counts.reported():
            self.bound.check(counts)
        return ValidationPacks(
            packs=packs,
            counts=counts,
            refused=self.refused + late,
            samples=sum(len(group.sizes) for group in self.groups),
        )


class ValidationGroups:
    """Groups of validation samples that share a pack, in stored order, each sample once.

    A group depends on the lengths of all samples before it, and not on the layout.
    """

    def __init__(
        self,
        config: RunConfig,
        leaves: tuple[DatasetSplit, ...],
        bound: Bound,
        work: PassWork | None,
    ):
        self._bound = bound
        self._encoder, groups = open_validation(config, leaves, bound, work)
        self._groups: SavableDataset[Any] = in_this_process(groups)
        self._fixed_levels = config.validation.fixed_levels
        self.late: list[RefusedSample] = []
        """Samples that were refused only when their packs were read."""

    def plan(self, count: int) -> ValidationPlan:
        """The first `count` groups; fewer if the split has fewer.

        Raises:
            DataError: no sample can be used, too many are refused, or their fixed levels are
                uneven.
        """
        counts = self._encoder.counts
        with counts.counts.reported():
            found = islice(self._groups, count)
            groups, stored, first = list[PlannedGroup](), list[list[int | None]](), 0
            for _, _, group in found:
                own = [sample.size.level_index for sample in group.samples]
                levels = (n % LEVELS if k is None else k for n, k in enumerate(own, start=first))
                groups.append(PlannedGroup(group.__restore_key__, _sizes(group), tuple(levels)))
                stored.append(own)
                first += len(own)
            if count and not groups:
                raise DataError("no usable sample in the whole validation split")
            taken = chain.from_iterable(islice(cycle(stored), count))
            if self._fixed_levels and (uneven := uneven_levels(taken)):
                raise DataError(
                    f"validation.fixed_levels=true: {uneven}; set train.eval_iters so that the"
                    " whole set is read once, and restore its missing samples, or set"
                    " validation.fixed_levels=false"
                )
        return ValidationPlan(
            groups=groups,
            counts=counts.counts.copied(),
            refused=counts.take_fresh(),
            bound=self._bound,
            needs_all=self._fixed_levels and any(k is not None for k in chain(*stored)),
        )

    def read(self, groups: Sequence[PlannedGroup]) -> Iterator[PackedBatch]:
        """Yields the packs of `groups`, each with its noise levels as FixedLevels.

        A pack whose samples are all refused is left out. Samples refused here are added to `late`.

        Raises:
            DataError: a shard has been changed since the plan was made.
        """
        for key, sizes, levels in groups:
            group = self._groups.restore_sample(key)
            if _sizes(group) != sizes:  # samples of other sizes could take more room than there is
                raise DataError(
                    f"{group.samples[0].place}: the size of this sample, or of one that shares its"
                    " pack, has changed since the run began; restore the shard, and do not change"
                    " the shards during a run"
                )
            finished = self._encoder.pack(group)
            self.late += [sample for sample, _ in finished.refused]
            if finished.pack is not None:
                copies = finished.pack.copies
                indices = [levels[n // copies] for n in range(finished.pack.num_samples)]
                yield finished.pack.with_method(FixedLevels(indices=tuple(indices)))


def _sizes(group: SampleGroup) -> tuple[tuple[int, int], ...]:
    return tuple(sample.size.shape for sample in group.samples)
