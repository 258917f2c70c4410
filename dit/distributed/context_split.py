"""The split of a pack over context ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from dit.batch import PackedBatch, Problem, SequenceShard


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
