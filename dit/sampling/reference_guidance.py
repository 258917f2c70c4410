"""Guidance away from samples without references (OmniGen2).

Such a network has two guidance scales, s for the text and i for the references:

    none + i (references - none) + s (both - references)

`none` is the prediction without references for the negative prompt, `references` that with
references for the negative prompt, and `both` that with references for the prompt. Source:
`OmniGen2Pipeline.processing` of the published code, which omits the second prediction if i is at
most 1: none + s (both - none).
"""

# T packed tokens, C patch features, N samples

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.objectives.objective import per_token
from dit.pack_wire import to_device
from dit.sampling.ode_solvers import Guidance, Network, rescaled


def without_references(
    network: Callable[[PackedBatch], Network], batch: PackedBatch, bare: PackedBatch
) -> Network:
    """A network that predicts the targets of `batch` without its references.

    `network` is a function from a pack to its network, and `bare` is the pack of the same samples
    without references. The result takes and returns tokens in the order of `batch`; its output is
    zero outside targets.
    """
    here, there = (to_device(_targets(one), batch.segment_T.device) for one in (batch, bare))
    run = network(bare)

    def moved(x_TC: Tensor, source: Tensor, target: Tensor, rows: int) -> Tensor:
        return x_TC.new_zeros(rows, x_TC.shape[1]).index_copy(0, target, x_TC[source])

    def of_targets(input_TC: Tensor, level_N: Tensor) -> Tensor:
        made_TC = run(moved(input_TC, here, there, len(bare.segment_T)), level_N)
        return moved(made_TC, there, here, len(input_TC))

    return of_targets


def _targets(batch: PackedBatch) -> Tensor:
    spans = zip(batch.starts, batch.latent_tokens, strict=False)
    return torch.cat([torch.arange(start, start + tokens) for start, tokens in spans])


def guided_by_references(
    both: Network, references: Network, none: Network, guidance: Guidance, batch: PackedBatch
) -> Network:
    """A network that combines the three predictions by the formula of this file.

    `references` is not called if the scale i is at most 1. As with other guidance,
    `Guidance.rescale` restores the standard deviation of `both`.
    """
    if guidance.scale == 1:
        return both

    def network(input_TC: Tensor, level_N: Tensor) -> Tensor:
        both_TC, scale_N = both(input_TC, level_N).float(), guidance.at(level_N)
        is_guided_N = guidance.acts(level_N)
        if not bool(is_guided_N.any()):
            return both_TC
        none_TC = of_prompt_TC = none(input_TC, level_N).float()
        if guidance.of_references > 1:
            own_TC = references(input_TC, level_N).float()
            of_references_N = torch.where(is_guided_N, guidance.of_references, 1.0)
            none_TC = none_TC + per_token(of_references_N, batch) * (own_TC - none_TC)
            of_prompt_TC = own_TC
        mixed_TC = none_TC + per_token(scale_N, batch) * (both_TC - of_prompt_TC)
        return rescaled(mixed_TC, both_TC, scale_N, guidance, batch)

    return network
