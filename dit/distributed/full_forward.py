"""The model of a replica as one function, whatever the layout of its ranks."""

# C patch features, T packed tokens, N samples

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from dit.batch import PackedBatch, Problem, SequenceShard
from dit.distributed.context_split import split_tokens
from dit.distributed.pipeline_p2p import StageLink
from dit.distributed.watchdog.monitor import heartbeat


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
        shape = (len(mine.segment_T), self.first.model.output_features)
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
