"""Classes that apply a `View`: they restrict the tokens that a layer gets, or that it changes."""
# T tokens of a row (a stream of tokens) on this rank, D model width

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dit.models.layers.parallel_linear import BuildContext
from dit.models.stacks.parts import JointConditions


class RunningView:
    """Base of classes that apply a `View` to one layer."""

    may_be_absent: ClassVar[bool] = False
    """Whether packs may lack the tokens that the layer changes, so that it is skipped."""

    def __init__(self, view: Any):
        self.view = view

    def is_absent(self, conditions: JointConditions) -> bool:  # noqa: ARG002
        """Whether the pack of `conditions` lacks the tokens that the layer changes."""
        return False

    def modules(
        self,
        context: BuildContext,  # noqa: ARG002
        width: int,  # noqa: ARG002
        layer: int,  # noqa: ARG002
    ) -> dict[str, nn.Module]:
        """The view's own modules, by name; `layer` is the index of the layer in its stack."""
        return {}

    def seen(
        self,
        layer: nn.Module,  # noqa: ARG002
        h_TD: Tensor,
        conditions: JointConditions,  # noqa: ARG002
    ) -> Tensor:
        """The tokens [T, D] that the layer gets, computed from its row `h_TD`."""
        return h_TD

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        """The row after the layer: `made_TD` for tokens that the layer changes, else `h_TD`."""
        raise NotImplementedError


class SeeingPictures(RunningView):
    """Applies `PicturesAlone`: the layer does not change the tokens of references."""

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        is_reference_T = conditions.is_reference_T
        if is_reference_T is None:
            return made_TD
        return torch.where(is_reference_T[:, None], h_TD, made_TD)


class SeeingReferences(RunningView):
    """Applies `ReferencesAlone`: the layer changes only the tokens of references.

    If any sample of a pack has references, the layer computes all tokens, so that each rank has the
    same number of tokens as in other layers.
    """

    may_be_absent = True

    def is_absent(self, conditions: JointConditions) -> bool:
        return conditions.is_reference_T is None

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        assert conditions.is_reference_T is not None
        return torch.where(conditions.is_reference_T[:, None], made_TD, h_TD)
