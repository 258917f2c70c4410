"""The links of Energon's chain that make groups of samples, each to become a pack.

1. OldestFirst    a buffer of samples -> a full group with the oldest of them, again and again
2. EvenCost       (dataset.balance=flops) which of several groups is next
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.buffer import SavableSampleBuffer
from megatron.energon.wrappers.packing_dataset import PackingDataset

from dit.data.bin_packing import best_fit_decreasing, full_with_first
from dit.data.energon.flops_balancing import turn
from dit.data.energon.readers import CookedSample


@edataclass
class SampleGroup(Sample):
    """Samples that share a pack."""

    samples: tuple[CookedSample, ...]
    cost: float
    """Of the pack in training, in any unit."""


class OldestFirst(PackingDataset):
    """Energon's packing, one group at a time; all that does not go along waits for newcomers.

    Energon has no such hook in 7.4: its reading buffer, which is empty while a group is selected
    and is saved with the state, takes back what waits.
    """

    def __init__(self, dataset: SavableDataset[CookedSample], *, capacity: int, **kwargs: Any):
        self._capacity = capacity
        super().__init__(dataset, pre_packer=self._select, final_packer_stateless=True, **kwargs)

    def _select(self, samples: list[CookedSample]) -> list[list[CookedSample]]:
        lengths = [sample.size.tokens for sample in samples]
        if len(samples) < self.buffer_size:  # the stream has ended
            bins = best_fit_decreasing(lengths, capacity=self._capacity)
            return [[samples[index] for index in members] for members in bins]
        chosen = full_with_first(lengths, capacity=self._capacity)
        left = samples.copy()
        group = [left.pop(index) for index in reversed(chosen)]
        self._reading_buffer.extend(left)
        return [group[::-1]]

    def _fill_reading_buffer(self, source_iter: Iterator, log_progress: bool = False) -> bool:
        del log_progress  # every worker would draw a bar of its own
        return super()._fill_reading_buffer(source_iter, log_progress=False)


class FlopsBalancedOrder(BaseWrapperDataset[SampleGroup, SampleGroup]):
    """Hands on the groups in an order in which those of all ranks cost alike at each turn."""

    _savable_fields = ("_waiting", "_turns")

    def __init__(
        self,
        dataset: SavableDataset[SampleGroup],
        *,
        packs: int,
        seed: int,
        worker_config: WorkerConfig,
    ):
        super().__init__(dataset, worker_config=worker_config)
        self._packs = packs
        self._seed = seed
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._waiting = SavableSampleBuffer(self.dataset, worker_config=self.worker_config)
        self._turns = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[SampleGroup]:
        self._waiting.worker_start()
        groups, waiting = iter(self.dataset), self._waiting
        while True:
            now = turn(self._turns, packs=self._packs, seed=self._seed)
            while len(waiting.buffer) < now.waiting and (group := next(groups, None)) is not None:
                waiting.append(group)
            if not waiting.buffer:
                return
            by_cost = sorted(range(len(waiting.buffer)), key=lambda i: waiting.buffer[i].cost)
            self._turns += 1
            yield waiting.pop(by_cost[min(now.place, len(by_cost) - 1)])

    def config(self) -> dict[str, Any]:
        return self.dataset.config()
