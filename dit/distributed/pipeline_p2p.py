"""What pipeline stages send each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor
from torch.distributed import ProcessGroup

Shape = list[int]


class StageLink(P2PCommunicator):
    """Megatron-Core's link between stages, for packs that differ in length.

    Megatron-Core sends the shape of each tensor ahead of it and waits until the shape is taken.
    With as many packs as stages, one virtual stage then waits to hand over a gradient's shape
    while the stage that should take it waits to hand over hidden states, for ever. But every stage
    has every pack, and the order of the schedule is known: so no shape is sent, and none is waited
    for.

    `batch_p2p_comm=False` belongs to it: each of two stages is both the next and the previous one
    of the other, and only that exchange has an order for it.
    """

    def __init__(self, group: ProcessGroup, config: ModelParallelConfig, shapes: Sequence[Shape]):
        """`shapes` are those of the hidden states of the packs, in the order of the packs."""
        super().__init__(group, config)
        virtual = config.virtual_pipeline_model_parallel_size or 1
        self._from_previous, self._from_next = received(
            shapes, stage=group.rank(), stages=group.size(), virtual=virtual
        )

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,  # noqa: ARG002
        tensor_send_prev: Tensor | None,  # noqa: ARG002
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """The shapes that will come from the previous and the next stage; Megatron-Core's hook."""
        previous = next(self._from_previous) if recv_prev else []
        following = next(self._from_next) if recv_next else []
        return previous, following


def received(
    shapes: Sequence[Shape], *, stage: int, stages: int, virtual: int
) -> tuple[Iterator[Shape], Iterator[Shape]]:
    """The shapes that a stage receives: hidden states of the one before, gradients of the next.

    Both come in the order in which packs pass through. The last stage's output comes round to
    the first as the input of the next virtual stage, unless it is the last virtual one's, and
    gradients come round the other way.
    """
    table = get_schedule_table(len(shapes), virtual, stages)
    every = [shapes[pack] for pack, _ in table]
    round_again = [shapes[pack] for pack, chunk in table if chunk < virtual - 1]
    return (
        iter(round_again if stage == 0 else every),
        iter(round_again if stage == stages - 1 else every),
    )
