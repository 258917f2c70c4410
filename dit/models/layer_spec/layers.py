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
    """The layers of a network, and the number of tokens that they see of a sample."""

    stacks: tuple[StackSpec, ...]
    trains_conditioner: bool = False
    """Whether the first stage has a conditioner, which makes text of captions before they are
    filled up (Anima)."""
    text_layers: str = ""
    """How the names of weights of layers over text alone begin, which are computed again in the
    backward pass, on the first stage."""
    text_tokens: int | None = None
    """Text is filled up to this many tokens a sample; None leaves it as long as it is."""
    attended_multiple: int = 1
    """Text and latents of a sample are filled up to a multiple of so many tokens, with attention
    to all of them."""
    image_rows: int = 0
    """Rows of an image encoder in each sample: of its text inputs' rows, but no text tokens."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Exchanges between tensor ranks in a pass, of all layers (see `LayerPart.exchanges`)."""
        return sum(stack.count * stack.layer.exchanges for stack in self.stacks)

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Text tokens that layers see, for samples with so many rows of all text inputs."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        if self.image_rows:
            lengths = [length - self.image_rows for length in lengths]
        return self.filled(lengths)

    def filled(self, lengths: Sequence[int]) -> Sequence[int]:
        """Tokens that layers see, for latents or texts of these `lengths`."""
        multiple = self.attended_multiple
        if multiple == 1:
            return lengths
        return [-(-length // multiple) * multiple for length in lengths]
