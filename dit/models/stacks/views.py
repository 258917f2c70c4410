"""The tokens of a row that a layer sees, and those that it changes (`View`)."""

# T tokens of a row as this rank holds them, D model width

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dit.models.layers.parallel_linear import BuildContext
from dit.models.stacks.parts import JointConditions


class RunningView:
    """Applies a `View`: which tokens of a row one layer sees, and which it changes."""

    may_be_absent: ClassVar[bool] = False
    """Whether packs may lack the tokens that the layer changes."""

    def __init__(self, view: Any):
        self.view = view

    def is_absent(self, conditions: JointConditions) -> bool:  # noqa: ARG002
        """Whether a pack lacks the tokens that the layer changes, so that nothing is computed."""
        return False

    def modules(
        self,
        context: BuildContext,  # noqa: ARG002
        width: int,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> dict[str, nn.Module]:
        """Modules of the view by name, registered after the layer's; layers count from 0."""
        return {}

    def seen(
        self,
        layer: nn.Module,  # noqa: ARG002
        h_TD: Tensor,
        conditions: JointConditions,  # noqa: ARG002
    ) -> Tensor:
        """The tokens on which the layer computes, from its row `h_TD`."""
        return h_TD

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        """The row after the layer: `made_TD` where the layer changes tokens, `h_TD` elsewhere."""
        raise NotImplementedError


class SeeingPictures(RunningView):
    """Applies a view of latents that leaves reference tokens unchanged."""

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        is_reference_T = conditions.is_reference_T
        if is_reference_T is None:
            return made_TD
        return torch.where(is_reference_T[:, None], h_TD, made_TD)


class SeeingReferences(RunningView):
    """Applies a view of latents that changes reference tokens alone.

    If any sample of a pack has references, the layer computes all rows, so that each rank holds the
    same number of rows as in other layers.
    """

    may_be_absent = True

    def is_absent(self, conditions: JointConditions) -> bool:
        return conditions.is_reference_T is None

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        assert conditions.is_reference_T is not None
        return torch.where(conditions.is_reference_T[:, None], made_TD, h_TD)
