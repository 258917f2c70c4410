"""Stacks of layers, and the stacks of a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dit.models.layer_spec.shapes import RowKind
from dit.models.layer_spec.steps import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """`count` layers of one kind; a network is a list of stacks."""

    name: str  # attribute of the network, and how the names of its weights in a checkpoint begin
    count: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The layers of a network, and the number of tokens that they process for a sample."""

    stacks: tuple[StackSpec, ...]
    trains_conditioner: bool = False
    """Whether the first stage has a conditioner, which processes captions before padding
    (Anima)."""
    text_layers: str = ""
    """Prefix of the weights of layers over text alone, which are recomputed in backward, on the
    first stage."""
    text_tokens: int | None = None
    """Text is padded to this many tokens in each sample; None: no padding."""
    attended_multiple: int = 1
    """Text and latents of a sample are padded to a multiple of this many tokens, and attention sees
    the padding."""
    image_rows: int = 0
    """Rows of an image encoder in each sample, which are part of its text inputs but no text
    tokens."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Number of tensor-parallel exchanges in a pass (see `LayerPart.exchanges`)."""
        return sum(stack.count * stack.layer.exchanges for stack in self.stacks)

    @property
    def attends_jointly(self) -> bool:
        """Whether attention covers latents and text together, so that both add to its cost."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Number of text tokens that layers process, for samples of `lengths` text rows."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        if self.image_rows:
            lengths = [length - self.image_rows for length in lengths]
        return self.filled(lengths)

    def filled(self, lengths: Sequence[int]) -> Sequence[int]:
        """Number of tokens that layers process, padding included, for these `lengths`."""
        multiple = self.attended_multiple
        if multiple == 1:
            return lengths
        return [-(-length // multiple) * multiple for length in lengths]
