"""Parameters and operations of a network, as sums over a description of its layers.

A family describes its network once (`Family.cost`): which linears it has and over which rows they
run, who attends to whom, which other weights there are. Everything else is counted from that, so
that estimates, plans and the cost of a pack need neither torch nor a formula for each family.
"""

# n latent tokens, m text tokens of a sample; D model width, F width inside a feed-forward

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from dit.config import ModelConfig
from dit.models.family import family_of

if TYPE_CHECKING:
    from dit.batch import PackedBatch


class RowKind(Flag):
    """What a linear runs over, or what attends: tokens, or one row for each sample."""

    LATENTS = auto()
    TEXT = auto()
    SAMPLES = auto()
    JOINT = LATENTS | TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """A matrix, which is as many multiplications for each row as it has weights."""

    inputs: int
    outputs: int
    rows: RowKind = RowKind.LATENTS
    bias: bool = False
    split: bool = False  # whether tensor ranks share it; a bias then counts as shared as well


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Every query of a sample with every key of it; `width` is that of all heads together."""

    width: int
    queries: RowKind = RowKind.LATENTS
    keys: RowKind = RowKind.LATENTS


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightShape:
    """Weights outside of matrices: norms, tables."""

    numbers: int
    split: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a part of a network consists of; parts add up."""

    linears: tuple[LinearShape, ...] = ()
    attentions: tuple[AttentionShape, ...] = ()
    weights: tuple[WeightShape, ...] = ()
    exchanges: int = 0
    """Times that tensor ranks gather tokens, compute with split matrices, and scatter them."""
    kept: float = 0.0
    """Numbers that the backward pass needs for each token and unit of width, inside of these."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            linears=self.linears + other.linears,
            attentions=self.attentions + other.attentions,
            weights=self.weights + other.weights,
            exchanges=self.exchanges + other.exchanges,
            kept=self.kept + other.kept,
        )

    def parameters(self, *, tensor: int = 1) -> int:
        """On one of `tensor` tensor ranks."""
        sizes = [((one.inputs + one.bias) * one.outputs, one.split) for one in self.linears]
        sizes += [(one.numbers, one.split) for one in self.weights]
        return sum(size // tensor if split else size for size, split in sizes)

    @property
    def multiplications(self) -> Multiplications:
        return _of_linears(self.linears) + _of_attentions(self.attentions)


@dataclass(frozen=True, slots=True)
class Multiplications:
    """Of a forward pass over a sample, as a polynomial in its n latent and m text tokens."""

    sample: int = 0
    n: int = 0
    m: int = 0
    nn: int = 0
    nm: int = 0
    mm: int = 0

    def __add__(self, other: Multiplications) -> Multiplications:
        return Multiplications(*(a + b for a, b in zip(self._all(), other._all(), strict=True)))

    def times(self, count: int) -> Multiplications:
        return Multiplications(*(count * one for one in self._all()))

    def _all(self) -> tuple[int, ...]:
        return (self.sample, self.n, self.m, self.nn, self.nm, self.mm)

    def of(self, tokens: Sequence[int], text: Sequence[int]) -> int:
        """Of samples with so many latent and text tokens."""
        total = self.sample * len(tokens) + self.n * sum(tokens) + self.m * sum(text)
        for n, m in zip(tokens, text, strict=True):
            total += self.nn * n * n + self.nm * n * m + self.mm * m * m
        return total


def _of_linears(linears: Iterable[LinearShape]) -> Multiplications:
    total: dict[RowKind, int] = dict.fromkeys(RowKind.SAMPLES | RowKind.JOINT, 0)
    for one in linears:
        for rows in one.rows:
            total[rows] += one.inputs * one.outputs
    return Multiplications(total[RowKind.SAMPLES], total[RowKind.LATENTS], total[RowKind.TEXT])


def _of_attentions(attentions: Iterable[AttentionShape]) -> Multiplications:
    """Queries with keys, and weights with values: 2 D for each pair."""
    nn = nm = mm = 0
    for one in attentions:
        for query in one.queries:
            for key in one.keys:
                text = (query is RowKind.TEXT) + (key is RowKind.TEXT)
                nn += 2 * one.width * (text == 0)
                nm += 2 * one.width * (text == 1)
                mm += 2 * one.width * (text == 2)
    return Multiplications(nn=nn, nm=nm, mm=mm)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackCost:
    """Layers of one kind, one after the other."""

    count: int
    layer: Cost


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """A network: what comes before its layers, the layers, and what comes after them."""

    before: Cost
    stacks: tuple[StackCost, ...]
    after: Cost
    text_tokens: int | None = None
    """Text is filled up to this many tokens a sample; None leaves it as long as it is."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Those of all layers."""
        return sum(stack.count * stack.layer.exchanges for stack in self.stacks)

    @cached_property
    def multiplications(self) -> Multiplications:
        total = self.before.multiplications + self.after.multiplications
        for stack in self.stacks:
            total += stack.layer.multiplications.times(stack.count)
        return total

    @cached_property
    def in_attention(self) -> Multiplications:
        """Those of `multiplications` that attention makes."""
        total = Multiplications()
        for stack in self.stacks:
            total += _of_attentions(stack.layer.attentions).times(stack.count)
        return total

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Text tokens that the layers see."""
        return lengths if self.text_tokens is None else [self.text_tokens] * len(lengths)

    def parameters(self, *, tensor: int = 1, pipeline: int = 1) -> int:
        """On the fullest rank: the first stage has what comes before the layers, the last the rest.

        Each stage has as many layers; where they are of several kinds, its kinds are the largest.
        """
        sizes = [stack.layer.parameters(tensor=tensor) for stack in self.stacks]
        each = [
            size for size, stack in zip(sizes, self.stacks, strict=True) for _ in range(stack.count)
        ]
        held = -(-len(each) // pipeline)
        layers = max(sum(each[at : at + held]) for at in range(0, len(each), held))
        ends = [self.before.parameters(tensor=tensor), self.after.parameters(tensor=tensor)]
        return layers + (sum(ends) if pipeline == 1 else max(ends))


@lru_cache(maxsize=64)  # of a plan's layouts; the cost of a pack is asked for at every pack
def network_cost(model: ModelConfig) -> NetworkCost:
    """The description of the network, by its family."""
    return family_of(model).cost(model)


def parameter_count(model: ModelConfig) -> int:
    """Trainable parameters of the whole model, over all ranks."""
    return network_cost(model).parameters()


def parameters_here(model: ModelConfig) -> int:
    """Trainable parameters on the fullest rank."""
    return network_cost(model).parameters(
        tensor=model.tensor_model_parallel_size, pipeline=model.pipeline_model_parallel_size
    )


def forward_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Operations of one forward pass over samples of `tokens` patches and `text` caption tokens.

    A product of matrices counts 2 m n k. Lengths are the true ones: padding of samples and
    recomputation count nothing. Linears go by tokens or samples, attention by pairs of tokens.
    """
    cost = network_cost(model)
    return 2 * cost.multiplications.of(tokens, cost.text(text))


def attention_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Those of `forward_flops` that attention takes."""
    cost = network_cost(model)
    return 2 * cost.in_attention.of(tokens, cost.text(text))


def pack_forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of one forward pass, from the true geometry of the pack."""
    return forward_flops(model, tokens=batch.num_tokens, text=batch.text_rows)


def training_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of a training step on a pack: the backward pass costs twice the forward one."""
    return 3 * pack_forward_flops(model, batch)
