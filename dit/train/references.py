"""Predictions of passes without gradients, and how they change the problems of a step.

cfg_target: a network with guidance w distilled into it predicts u + w (v - u), where v is the
original network's prediction with caption, and u the one without. Trained on plain targets it would
lose w. So the target is u + w (target - u), with the network's own u for the same noisy state. The
loss of other trainers, ((f + (w - 1) u) / w - target)², is this loss divided by w².
"""

# C patch features, T packed tokens of this context rank, N samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """Predictions of passes without gradients, one entry for each pack of a step, in order.

    `uncaptioned_TC` and `unadapted_TC` are predictions without caption and without adapters,
    float32 [T, C]. They and `error_N` are on the last pipeline stage; other stages have empty
    lists. A list is empty as well if the loss needs no such predictions.
    """

    factor_N: Sequence[Tensor]
    """Guidance scale w of each sample of each pack, on every stage; empty without `cfg_target`."""
    uncaptioned_TC: Sequence[Tensor] = ()
    unadapted_TC: Sequence[Tensor] = ()
    error_N: Sequence[Tensor] = ()
    """Mean error without adapters of each sample of preference pairs, float64."""
    flops: int = 0
    """FLOPs of all these passes over a replica's packs, by the whole network; on every stage."""


def with_references(
    batch: PackedBatch, problem: Problem, references: References, pack: int
) -> Problem:
    """The `problem` of this context rank's shard of a pack, changed as `references` demand.

    `pack` is the index of the pack in the step, and `batch` this rank's shard of it.
    """
    unread_T1 = ~batch.is_target_T[:, None]  # predictions may be NaN there, and so would gradients
    if references.uncaptioned_TC:
        factor_T1 = references.factor_N[pack][batch.segment_T, None]
        # `lerp` keeps the bits of the target where w is 1.
        moved_TC = torch.lerp(references.uncaptioned_TC[pack], problem.target_TC, factor_T1)
        problem = replace(problem, target_TC=moved_TC.masked_fill(unread_T1, 0))
    if references.unadapted_TC:
        problem = replace(
            problem, anchor_TC=references.unadapted_TC[pack].masked_fill(unread_T1, 0)
        )
    if references.error_N:
        problem = replace(problem, reference_N=references.error_N[pack])
    return problem
