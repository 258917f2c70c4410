"""Mixture of experts: a router weights the outputs of several feed-forwards for each token."""

# T tokens, D model width, E experts

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from dit.models.hidream.family import FeedExperts
from dit.models.layers.parallel_linear import BuildContext, FeedForward, Replicated
from dit.models.stacks.parts import Feeding


class Experts(MegatronModule):
    """A mixture of experts (`FeedExperts`) in which every expert computes every token.

    Tensor ranks divide the hidden units of each expert. Outputs are summed over the ranks before
    they are multiplied by router weights, so each rank has the whole gradient of the router weights
    of its tokens. As in the published networks, the softmax is not renormalised over the chosen
    experts, and there is no load-balancing loss. Source: `MOEFeedForwardSwiGLU` of Diffusers.
    """

    def __init__(self, context: BuildContext, part: FeedExperts):
        super().__init__(config=context.config)
        self.count, self.chosen = part.count, part.chosen
        rows: Any = {"config": context.config, "token_row": context.token_row}
        self.router = Replicated(part.width, part.count, **rows)
        self.shared = FeedForward(context, part.shared)
        # Attributes: Megatron-Core would store the split weights of a ModuleList as if they were
        # whole.
        for number in range(part.count):
            setattr(self, f"expert_{number}", FeedForward(context, part.feed_forward))

    def weights(self, x_TD: Tensor) -> Tensor:
        """The router weights [T, E] of the experts for each token; 0 for experts not chosen."""
        p_TE = self.router(x_TD).softmax(-1)
        chosen_TX, expert_TX = p_TE.topk(self.chosen, dim=-1)
        return torch.zeros_like(p_TE).scatter(-1, expert_TX, chosen_TX)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD = self.shared(x_TD)
        for number, weight_T1 in enumerate(self.weights(x_TD).split(1, dim=-1)):
            expert = getattr(self, f"expert_{number}")
            out_TD = torch.addcmul(out_TD, weight_T1, expert(x_TD))
        return out_TD


class FeedingExperts(Feeding):
    """Runs a mixture of experts in the place of a layer's MLP."""

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        part = self.part
        assert isinstance(part, FeedExperts)
        return {part.port.module: Experts(replace(context, token_row=part.port.row), part)}
