"""What layers see in the place of a row, and which of its tokens they write (`View`)."""

# T tokens of a row as this rank holds them, D model width

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dit.models.layers.parallel_linear import BuildContext
from dit.models.stacks.parts import JointConditions


class RunningView:
    """What one layer sees in the place of a row, and which of its tokens it writes."""

    may_be_absent: ClassVar[bool] = False
    """Whether packs may have none of the tokens that it writes."""

    def __init__(self, view: Any):
        self.view = view

    def is_absent(self, conditions: JointConditions) -> bool:  # noqa: ARG002
        """Whether a pack has none of the tokens that it writes, so that nothing is computed."""
        return False

    def modules(
        self,
        context: BuildContext,  # noqa: ARG002
        width: int,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> dict[str, nn.Module]:
        """Its modules by name, registered last; layers are counted from 0."""
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
        """The tokens behind the layer, which made `made_TD` of them."""
        raise NotImplementedError


class SeeingPictures(RunningView):
    """Latents of which the references stay as they are; they have other layers."""

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        is_reference_T = conditions.is_reference_T
        if is_reference_T is None:
            return made_TD
        return torch.where(is_reference_T[:, None], h_TD, made_TD)


class SeeingReferences(RunningView):
    """The references among the latents.

    The layer computes all rows of a pack that has any, so that ranks hold as many as for other
    layers.
    """

    may_be_absent = True

    def is_absent(self, conditions: JointConditions) -> bool:
        return conditions.is_reference_T is None

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        assert conditions.is_reference_T is not None
        return torch.where(conditions.is_reference_T[:, None], made_TD, h_TD)
