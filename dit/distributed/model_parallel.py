"""The split of a pack over context ranks."""

# C patch features, T packed tokens, N samples

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from dit.batch import PackedBatch, Problem, SequenceShard
from dit.distributed.watchdog.monitor import heartbeat


def split_tokens(
    batch: PackedBatch, problem: Problem, *, share: SequenceShard, multiple: int
) -> tuple[PackedBatch, Problem]:
    """A context rank's part of every sample, filled up with padding to a `multiple` of tokens.

    Sequence parallelism shares the tokens of a rank out over tensor ranks, hence the multiple. All
    draws were made for the whole pack before, so the numbers are those of a rank alone.
    """
    rows_T = batch.rows(share)
    filling = -len(rows_T) % multiple
    if share.count == 1 and filling == 0:
        return batch, problem
    rows_T = rows_T.to(batch.latent_TC.device, non_blocking=True)

    def part(whole: Tensor, value: Any = 0) -> Tensor:
        mine = whole[rows_T]
        return pad(mine, (0, 0) * (mine.dim() - 1) + (0, filling), value=value)

    mine = replace(
        batch,
        latent_TC=part(batch.latent_TC),
        position_T3=part(batch.position_T3),
        segment_T=part(batch.segment_T, batch.num_samples - 1),
        is_real_T=part(batch.is_real_T, False),
        share=share,
    )
    return mine, replace(
        problem, input_TC=part(problem.input_TC), target_TC=part(problem.target_TC)
    )


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


class FullForward(nn.Module):
    """A whole pack in, the raw output of all its tokens out, on every rank of the replica.

    All of its tensor, context and pipeline ranks call it with the same numbers. For sampling:
    the backward pass is not for it.
    """

    def __init__(self, chunks: Sequence[nn.Module]):
        """`chunks` are the parts of the model here, with or without their DDP."""
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.first: Any = getattr(chunks[0], "module", chunks[0])
        self.groups = self.first.groups

    @torch.no_grad()
    def forward(self, input_TC: Tensor, level_N: Tensor, batch: PackedBatch) -> Tensor:
        heartbeat("sampling")
        share = self.first.context.share
        multiple = self.groups.tp.size() if self.first.config.sequence_parallel else 1
        problem = Problem(
            input_TC=input_TC,
            level_N=level_N,
            target_TC=input_TC,  # nothing is learnt
            weight_N=level_N,
            noise_N=level_N,
        )
        mine, problem = split_tokens(batch, problem, share=share, multiple=multiple)
        if self.groups.pp.size() == 1:
            out_TC = self.chunks[0](problem.input_TC, level_N, mine)
        else:
            out_TC = self._through_stages(problem.input_TC, level_N, mine)
        return self._joined(out_TC, batch, share)

    def _through_stages(self, input_TC: Tensor, level_N: Tensor, mine: PackedBatch) -> Tensor:
        """One pass through the pipeline; the last stage gives its output to all."""
        virtual, stages = len(self.chunks), self.groups.pp.size()
        passes = stages if virtual > 1 else 1  # the interleaved schedule takes multiples

        def forward(_: Iterator[None], model: nn.Module) -> tuple[Tensor, None]:
            return model(input_TC, level_N, mine), None

        shapes = [self.first.hidden_shape(mine)] * passes
        given = [iter([None] * passes) for _ in self.chunks]
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=given if virtual > 1 else given[0],
            model=[*self.chunks],
            num_microbatches=passes,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            p2p_communicator=StageLink(self.groups.pp, self.first.config, shapes),
            pg_collection=self.groups,
        )
        shape = (len(mine.segment_T), self.first.model.patch_features)
        out_TC = outputs[0].float() if outputs else input_TC.new_empty(shape)
        out_TC = out_TC.contiguous()
        dist.broadcast(out_TC, group=self.groups.pp, group_src=stages - 1)
        return out_TC

    def _joined(self, out_TC: Tensor, batch: PackedBatch, share: SequenceShard) -> Tensor:
        """The tokens of all context ranks in the order of the pack."""
        if share.count == 1:
            return out_TC[: len(batch.segment_T)]
        part_TC = out_TC[: len(batch.segment_T) // share.count].contiguous()
        parts = [torch.empty_like(part_TC) for _ in range(share.count)]
        dist.all_gather(parts, part_TC, group=self.groups.cp)
        whole_TC = part_TC.new_empty(len(batch.segment_T), part_TC.shape[1])
        for index, part in enumerate(parts):
            rows_T = batch.rows(SequenceShard(index=index, count=share.count, halves=share.halves))
            whole_TC[rows_T.to(part.device)] = part
        return whole_TC
