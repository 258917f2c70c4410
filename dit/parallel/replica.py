"""The ranks that share one replica of the model: one of them reads, all get the same packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch


class Replica:
    """Tensor, context and pipeline ranks of one data-parallel rank.

    Packs are handed out before a schedule starts. Inside, a stage that waits for packs and one that
    waits for hidden states would wait for each other.
    """

    def __init__(self, groups: ProcessGroupCollection):
        """Collective: every rank of the run makes its own."""
        mine = groups.dp.rank()
        known = [mine] * dist.get_world_size()
        dist.all_gather_object(known, mine)
        replicas = [[r for r, d in enumerate(known) if d == data] for data in sorted(set(known))]
        group, _ = dist.new_subgroups_by_enumeration(replicas)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.source = replicas[mine][0]
        self.reads = dist.get_rank() == self.source
        """Whether this rank is the one that reads."""

    def share(
        self, take: Callable[[], list[PackedBatch]], device: torch.device
    ) -> list[PackedBatch]:
        """What `take` gives on the rank that reads, on `device`; the others do not call it.

        Raises:
            Exception: what `take` raised, on every rank.
        """
        if self.group.size() == 1:
            return [pack.to(device) for pack in take()]
        header: list[Any] = [None]
        rows: list[Tensor] = []
        if self.reads:
            try:
                packs = [pack.to(device) for pack in take()]
                joined = [pack.joined() for pack in packs]
                header, rows = [[outline for outline, _ in joined]], [row for _, row in joined]
            except Exception as error:  # noqa: BLE001  # raised below, here as on the others
                header = [error]
        dist.broadcast_object_list(header, src=self.source, group=self.group, device=device)
        if isinstance(header[0], Exception):
            raise header[0]
        outlines: list[PackedBatch] = header[0]
        if not self.reads:
            sizes = [sum(t.nbytes for t in outline.tensors.values()) for outline in outlines]
            rows = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        for row in rows:
            dist.broadcast(row, src=self.source, group=self.group)
        return [outline.filled(row) for outline, row in zip(outlines, rows, strict=True)]
