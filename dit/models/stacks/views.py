"""The tokens of a row that a layer sees, and those that it changes (`View`)."""

# T tokens of a row as this rank holds them, D model width

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dit.models.layers.parallel_linear import BuildContext
from dit.models.stacks.parts import JointConditions


class RunningView:
    """The tokens of a row that one layer sees, and those that it changes."""

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
        """The view's modules by name, registered last; layers are counted from 0."""
        return {}

    def seen(
        self,
        layer: nn.Module,  # noqa: ARG002
        h_TD: Tensor,
        conditions: JointConditions,  # noqa: ARG002
    ) -> Tensor:
        """The tokens that the layer sees."""
        return h_TD

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        """The row after the layer, whose output for the seen tokens is `made_TD`."""
        raise NotImplementedError


class SeeingPictures(RunningView):
    """A view of latents that leaves references unchanged; they have other layers."""

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        is_reference_T = conditions.is_reference_T
        if is_reference_T is None:
            return made_TD
        return torch.where(is_reference_T[:, None], h_TD, made_TD)


class SeeingReferences(RunningView):
    """A view of the reference tokens.

    The layer computes all rows of a pack that has any references, so that ranks hold as many as for
    other layers.
    """

    may_be_absent = True

    def is_absent(self, conditions: JointConditions) -> bool:
        return conditions.is_reference_T is None

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        assert conditions.is_reference_T is not None
        return torch.where(conditions.is_reference_T[:, None], made_TD, h_TD)
