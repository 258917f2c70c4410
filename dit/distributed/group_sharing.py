"""Fewer groups: those that nothing uses share those of groups with the same ranks.

Megatron-Core makes all groups that any of its features needs, experts and embeddings that stages
share included. All ranks join each call, and a group takes threads, and memory of the GPU once NCCL
has a communicator for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_UNUSED = {
    "DATA_PARALLEL_GROUP",  # its ranks are counted; sums go over the group with context ranks
    "EMBEDDING_GROUP",
    "EXPERT_DATA_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",  # from Megatron-Core 0.19 on
    "EXPERT_TENSOR_PARALLEL_GROUP",
    "POSITION_EMBEDDING_GROUP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "TENSOR_AND_DATA_PARALLEL_GROUP",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
}
"""Megatron-Core's descriptions of groups in which no message is sent here.

They are whole groups all the same: should a later version send one, it arrives.
"""


@contextmanager
def sharing_unused_groups() -> Iterator[None]:
    """Inside, Megatron-Core makes one group for all unused ones and one used one of the same ranks.

    Used groups keep communicators of their own: two that send at the same time must not wait for
    each other. Of one rank, which sends nothing, there is a single group, which it makes by itself:
    the others would have as many calls as there are ranks.
    """
    from megatron.core import parallel_state

    original: Any = parallel_state.create_group
    parallel_state.create_group = _shared(original)
    try:
        yield
    finally:
        parallel_state.create_group = original


def _shared(create: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    used: dict[tuple[int, ...], int] = defaultdict(int)  # how many of them a used group has taken

    def create_or_share(ranks: Sequence[int], *arguments: Any, **options: Any) -> Any:
        """All ranks ask for all groups in the same order, so that all decide alike."""
        key = tuple(ranks)
        alone = len(key) == 1
        if alone and dist.get_rank() not in key:
            return dist.GroupMember.NON_GROUP_MEMBER
        free = alone or options.get("group_desc") in _UNUSED
        taken = 0 if free else used[key]
        if taken == len(made[key]):
            options |= {"use_local_synchronization": True} if alone else {}
            made[key].append(create(ranks, *arguments, **options))
        used[key] += not free
        return made[key][taken]

    return create_or_share
