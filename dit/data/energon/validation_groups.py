"""The fixed list of validation packs, of which every rank reads only its own.

1. ValidationGroups.plan    on one rank: which samples share a pack, from the heads of all samples
2. ValidationGroups.read    on the rank that keeps a pack: the samples of its group
3. ValidationPlan.packs     the packs with the counts of all ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from megatron.energon.flavors.base_dataset import SavableDataset

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data.datasets import DatasetSplit
from dit.data.energon.internals import in_this_process
from dit.data.energon.task_encoder import open_validation
from dit.data.rejections import Bound, DataError, RefusedSample, RejectCounts


class PlannedGroup(NamedTuple):
    """Samples that share a pack."""

    key: tuple[Any, ...]
    """Where they lie: Energon's restore key of their group."""
    cost: float
    """That of their sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPacks:
    """Packs that are read once and kept."""

    packs: list[PackedBatch]
    counts: RejectCounts
    """Counts of the samples of the whole list of packs."""
    refused: tuple[RefusedSample, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPlan:
    """Which samples share a pack, and what was refused to find that out."""

    groups: list[PlannedGroup]
    counts: RejectCounts
    refused: tuple[RefusedSample, ...]
    bound: Bound

    def of(self, indices: Iterable[int]) -> list[PlannedGroup]:
        """The groups at places of the list, which starts over at its end."""
        return [self.groups[index % len(self.groups)] for index in indices]

    def packs(self, packs: list[PackedBatch], *, late: Iterable[RefusedSample]) -> ValidationPacks:
        """The packs of a rank; `late` are samples that any rank refused when it read them.

        Raises:
            DataError: too many samples were refused.
        """
        # Two ranks may have read the same pack, where the list is short.
        late, counts = tuple(dict.fromkeys(late)), self.counts.copied()
        for sample in late:
            counts.refuse(sample)
        with counts.reported():
            self.bound.check(counts)
        return ValidationPacks(packs=packs, counts=counts, refused=self.refused + late)


class ValidationGroups:
    """Validation samples in groups that share a pack, in stored order, each sample once.

    The groups follow from the lengths of all samples before them, and not from the layout.
    """

    def __init__(self, config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound):
        self._bound = bound
        self._encoder, groups = open_validation(config, leaves, bound)
        self._groups: SavableDataset[Any] = in_this_process(groups)
        self.late: list[RefusedSample] = []
        """Samples that were found unusable when their packs were read."""

    def plan(self, count: int) -> ValidationPlan:
        """The first `count` groups; fewer where the split has fewer.

        Raises:
            DataError: no sample can be used, or too many cannot.
        """
        counts = self._encoder.counts
        with counts.counts.reported():
            found = islice(self._groups, count)
            groups = [PlannedGroup(group.__restore_key__, group.cost) for _, _, group in found]
            if count and not groups:
                raise DataError("no usable sample in the whole split")
        return ValidationPlan(
            groups=groups,
            counts=counts.counts.copied(),
            refused=counts.take_fresh(),
            bound=self._bound,
        )

    def read(self, groups: Sequence[PlannedGroup]) -> Iterator[PackedBatch]:
        """The packs of these groups, without those whose samples are all refused.

        Raises:
            DataError: a shard has been changed since the plan was made.
        """
        for key, cost in groups:
            group = self._groups.restore_sample(key)
            if group.cost != cost:  # samples of other sizes could take more room than there is
                raise DataError(
                    f"{group.samples[0].place}: this sample, or one that shares its pack, has"
                    " another size than a moment ago; leave the shards of a run as they are"
                )
            finished = self._encoder.pack(group)
            self.late += [sample for sample, _ in finished.refused]
            if finished.pack is not None:
                yield finished.pack
