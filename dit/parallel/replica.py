"""The ranks that share one replica of the model: one of them reads, all get the same packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
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
        packs: list[PackedBatch] = []
        header: list[Any] = [None]
        if self.reads:
            try:
                packs = [pack.to(device) for pack in take()]
                header = [[_describe(pack) for pack in packs]]
            except Exception as error:  # noqa: BLE001  # raised below, here as on the others
                header = [error]
        dist.broadcast_object_list(header, src=self.source, group=self.group, device=device)
        if isinstance(header[0], Exception):
            raise header[0]
        return self._fill(header[0], packs, device)

    def _fill(
        self, headers: list[PackedBatch], packs: list[PackedBatch], device: torch.device
    ) -> list[PackedBatch]:
        """Sends the tensors of all packs as one, and gives each pack its own."""
        empty = [t for header in headers for t in _tensors(header).values()]
        if self.reads:
            full = [t for pack in packs for t in _tensors(pack).values()]
            flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in full])
        else:
            size = sum(t.numel() * t.element_size() for t in empty)
            flat = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=self.source, group=self.group)
        if self.reads:
            return packs
        sizes = [t.numel() * t.element_size() for t in empty]
        # Cloned, because a part may begin where its type must not.
        filled = [
            part.clone().view(t.dtype).view(t.shape)
            for part, t in zip(flat.split(sizes), empty, strict=True)
        ]
        rest = iter(filled)
        return [replace(header, **{n: next(rest) for n in _tensors(header)}) for header in headers]


def _tensors(pack: PackedBatch) -> dict[str, Tensor]:
    values = {f.name: getattr(pack, f.name) for f in fields(pack)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _describe(pack: PackedBatch) -> PackedBatch:
    """The pack with tensors that have a shape and a type but no contents."""
    return replace(
        pack, **{n: torch.empty_like(t, device="meta") for n, t in _tensors(pack).items()}
    )
