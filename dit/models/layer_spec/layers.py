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
    """The layers of a network, and how many text tokens of a sample they process."""

    stacks: tuple[StackSpec, ...]
    trains_conditioner: bool = False
    """Whether the first stage has a separate network for captions, which runs before they are
    padded (Anima)."""
    text_layers: str = ""
    """Prefix of the weights of layers over text alone. These layers run on the first stage, and are
    recomputed in the backward pass."""
    text_tokens: int | None = None
    """Text is padded to this many tokens in each sample; None: no padding."""
    attended_multiple: int = 1
    """Text and latents of a sample are padded to a multiple of this many tokens, and attention sees
    the padding."""
    image_rows: int = 0
    """Number of an image encoder's rows in each sample. Text inputs count them, but they are not
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
        """Whether any attention is over latents and text together, so that both add to its cost."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Numbers of text tokens that layers process, for samples with `lengths` text rows."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        if self.image_rows:
            lengths = [length - self.image_rows for length in lengths]
        return self.filled(lengths)

    def filled(self, lengths: Sequence[int]) -> Sequence[int]:
        """`lengths`, each rounded up to a multiple of `attended_multiple` by padding."""
        multiple = self.attended_multiple
        if multiple == 1:
            return lengths
        return [-(-length // multiple) * multiple for length in lengths]
