"""Stacks of layers, and the stacks of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dit.models.layer_spec.shapes import RowKind
from dit.models.layer_spec.steps import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """A stack of `count` layers with equal specifications; a network is a list of stacks."""

    name: str  # attribute of the network, and prefix of its weights' names in a checkpoint
    count: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The layers of a network, and the number of text tokens that they process for a sample."""

    stacks: tuple[StackSpec, ...]
    trains_conditioner: bool = False
    """Whether the first pipeline stage has a conditioner, a network that processes captions before
    they are padded (Anima)."""
    text_layers: str = ""
    """Prefix of the weights of layers over text before all stacks. These layers run on the
    first pipeline stage and are recomputed in the backward pass; "" if there are none."""
    text_tokens: int | None = None
    """Number of tokens to which the text of each sample is padded; None: no padding."""
    attended_multiple: int = 1
    """Text and latents of a sample are padded to multiples of this many tokens, and layers attend
    to the padding."""
    image_rows: int = 0
    """Number of rows in the text of each sample that an image encoder computed, and that are not
    text tokens."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Number of tensor-parallel exchanges in a pass (see `LayerPart.exchanges`)."""
        return sum(stack.count * stack.layer.exchanges for stack in self.stacks)

    @property
    def attends_jointly(self) -> bool:
        """Whether any attention is over latents and text jointly."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """The numbers of text tokens that layers process, padding included.

        `lengths` are the numbers of text rows of the samples.
        """
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        if self.image_rows:
            lengths = [length - self.image_rows for length in lengths]
        return self.filled(lengths)

    def filled(self, lengths: Sequence[int]) -> Sequence[int]:
        """`lengths`, each rounded up to a multiple of `attended_multiple`."""
        multiple = self.attended_multiple
        if multiple == 1:
            return lengths
        return [-(-length // multiple) * multiple for length in lengths]
