"""A network made of stacks: what comes before its layers, the layers, and what comes after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dit.models.layer_spec.layers import StackSpec
from dit.models.layer_spec.shapes import Cost, Multiplications, RowKind


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """A network: what comes before its layers, the layers, and what comes after them."""

    before: Cost
    stacks: tuple[StackSpec, ...]
    after: Cost
    text_tokens: int | None = None
    """Text is filled up to this many tokens a sample; None leaves it as long as it is."""
    image_rows: int = 0
    """Rows of an image encoder in each sample: of its text inputs' rows, but no text tokens. The
    description counts what they cost with the sample."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Those of all layers."""
        return sum(stack.count * stack.layer.cost.exchanges for stack in self.stacks)

    @cached_property
    def multiplications(self) -> Multiplications:
        total = self.before.multiplications + self.after.multiplications
        for stack in self.stacks:
            total += stack.layer.cost.multiplications.times(stack.count)
        return total

    @cached_property
    def in_attention(self) -> Multiplications:
        """Those of `multiplications` that attention makes."""
        total = Multiplications()
        for stack in self.stacks:
            total += stack.layer.cost.in_attention.times(stack.count)
        return total

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.cost.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Text tokens that the layers see, of samples with so many rows of all text inputs."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        return [length - self.image_rows for length in lengths] if self.image_rows else lengths

    def parameters(self, *, tensor: int = 1, pipeline: int = 1) -> int:
        """On the fullest rank: the first stage has what comes before the layers, the last the rest.

        Each stage has as many layers; where they are of several kinds, its kinds are the largest.
        """
        sizes = [stack.layer.cost.parameters(tensor=tensor) for stack in self.stacks]
        each = [
            size for size, stack in zip(sizes, self.stacks, strict=True) for _ in range(stack.count)
        ]
        held = -(-len(each) // pipeline)
        layers = max(sum(each[at : at + held]) for at in range(0, len(each), held))
        ends = [self.before.parameters(tensor=tensor), self.after.parameters(tensor=tensor)]
        return layers + (sum(ends) if pipeline == 1 else max(ends))

    def layer_matrices(self, *, tensor: int = 1) -> tuple[int, int]:
        """Numbers, and rows, of the matrices of a layer, on average over the kinds of layers."""
        each = [(s.count, s.layer.cost) for s in self.stacks]
        numbers = sum(count * cost.matrix_numbers(tensor=tensor) for count, cost in each)
        rows = sum(count * cost.matrix_rows for count, cost in each)
        return numbers // self.layers, rows // self.layers

    def adapter_numbers(self, rank: int, *, tensor: int = 1, pipeline: int = 1) -> int:
        """Of adapters of attention and MLP in all layers, on one of the pipeline stages."""
        each = [s.layer.cost.adapter_numbers(rank, tensor=tensor) * s.count for s in self.stacks]
        return -(-sum(each) // pipeline)
