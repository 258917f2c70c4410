"""A layer as steps over named rows of tokens, which networks write down and layers compute.

row   hidden states of tokens by name: `TOKENS` (latents), `TEXT_TOKENS`, or `JOINT_TOKENS` (both)
port  where a module meets a row: how tokens enter it, and how its output is added to them
part  what is computed: attention, a feed-forward, or a family's own; its modules have ports
step  one part
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from dit.models.layer_spec.parts import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModulationSpec,
    QkNorm,
    TableModulation,
)
from dit.models.layer_spec.shapes import (
    AFFINE,
    BY_TABLE,
    CROSS,
    CROSS_ACROSS_HEADS,
    EXCHANGED,
    EXCHANGED_ACROSS_HEADS,
    MODULATED,
    OF_CUBES,
    OF_IMAGE,
    SELF,
    SELF_ACROSS_HEADS,
    UNCHANGED,
    AttentionShape,
    KeptBy,
    LayerNeeds,
    RowKind,
)

TOKENS = "hidden"
"""The row of latent tokens."""


@dataclass(frozen=True, slots=True)
class Modulation:
    """A module that makes scales, shifts and gates of some ports of a layer.

    `modulation[0]` are those of its first port.
    """

    name: str
    kind: ModulationSpec

    def __getitem__(self, number: int) -> Slot:
        return Slot(self, number)


@dataclass(frozen=True, slots=True)
class Slot:
    """One scale, shift and gate of a modulation."""

    modulation: Modulation
    number: int


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A LayerNorm with weights, of a name of its own."""

    name: str
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Port:
    """Where the module of a part meets a row of tokens.

    x = norm(h) * (1 + scale) + shift;    h = h + gate * module(x)

    Source: adaLN-Zero of arXiv:2212.09748, Sec. 3.2.
    """

    row: str
    module: str = ""
    """Its name, as checkpoints have it; a part may have none, or several of fixed names."""
    slot: Slot | None = None
    """Scale, shift and gate; None: tokens are neither scaled nor gated."""
    norm: RowNorm | None = None
    """None: with a slot, the norm without weights that its kernel computes, without one none."""


@dataclass(frozen=True)
class Part:
    """What a step computes of the tokens that enter its ports."""

    runs: ClassVar[str]
    """Module and name of the class that computes it (`dit.models.stacks.parts`): specifications
    need no torch."""

    port: Port

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.port,)

    @property
    def width(self) -> int:
        """Width of the tokens that enter its ports."""
        raise NotImplementedError

    @property
    def needs(self) -> LayerNeeds:
        """What it attends to, exchanges and keeps, without norms and modulation."""
        return LayerNeeds()


@dataclass(frozen=True)
class Attend(Part):
    """Tokens of a row attend to those of their sample."""

    runs: ClassVar[str] = "dit.models.stacks.parts:SelfAttending"
    attention: AttentionSpec

    @property
    def width(self) -> int:
        return self.attention.width

    @property
    def needs(self) -> LayerNeeds:
        across = self.attention.norm is QkNorm.ACROSS_HEADS
        sparse = self.attention.sparse_pairs is not None
        kept = SELF_ACROSS_HEADS if across else SELF
        return LayerNeeds(
            attentions=(AttentionShape(width=self.width),),
            exchanges=1,
            kept=kept + OF_CUBES if sparse else kept,
            kept_exchanged=EXCHANGED_ACROSS_HEADS if across else EXCHANGED,
            cube_heads=self.attention.heads if sparse else 0,
        )


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows that tokens attend to, whole on every rank: a caption, or what is made of images."""

    width: int
    name: str = "text"
    each: int | None = None
    """Rows of each sample, where all have as many."""


@dataclass(frozen=True)
class AttendTo(Part):
    """Tokens of a row attend to other rows of their sample, which the layer does not change.

    Each of `keys` has keys, values and a softmax of its own, and what they give is added up.
    """

    runs: ClassVar[str] = "dit.models.stacks.parts:CrossAttending"
    attention: AttentionSpec
    keys: tuple[KeyRows, ...]

    @property
    def width(self) -> int:
        return self.attention.width

    @property
    def needs(self) -> LayerNeeds:
        width = self.width
        kept = CROSS_ACROSS_HEADS if self.attention.norm is QkNorm.ACROSS_HEADS else CROSS
        shapes = [
            AttentionShape(width=width, keys=RowKind.TEXT)
            if rows.each is None
            else AttentionShape(width=width, keys=RowKind.SAMPLES, times=rows.each)
            for rows in self.keys
        ]
        total = LayerNeeds(attentions=(*shapes,), exchanges=1, kept=kept, kept_of_text=kept)
        return sum((LayerNeeds(kept=OF_IMAGE) for _ in self.keys[1:]), total)


@dataclass(frozen=True)
class Feed(Part):
    """The feed-forward of a row: one MLP, or experts."""

    runs: ClassVar[str] = "dit.models.stacks.parts:Feeding"
    feed_forward: FeedForwardSpec | ExpertsSpec

    @property
    def width(self) -> int:
        return self.feed_forward.width

    @property
    def needs(self) -> LayerNeeds:
        return LayerNeeds(exchanges=self.feed_forward.exchanges, kept=self.feed_forward.kept)


@dataclass(frozen=True)
class LayerSpec:
    """The steps of a layer, one after the other."""

    steps: tuple[Part, ...]

    @property
    def ports(self) -> Iterator[Port]:
        for part in self.steps:
            yield from part.ports

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows that the layer changes."""
        return tuple(dict.fromkeys(port.row for port in self.ports))

    def slots(self, modulation: Modulation) -> int:
        """Number of scales, shifts and gates that a modulation makes."""
        used = (port.slot for port in self.ports if port.slot)
        return 1 + max(slot.number for slot in used if slot.modulation == modulation)

    @cached_property  # a planner asks for it many times
    def needs(self) -> LayerNeeds:
        total = LayerNeeds()
        for part in self.steps:
            total += part.needs
            if part.needs.exchanges:
                total += sum((LayerNeeds(kept=_kept_around(p)) for p in part.ports), LayerNeeds())
        return total


def _kept_around(port: Port) -> KeptBy:
    """What norm, modulation and sum of a port keep."""
    if port.slot is not None:
        return BY_TABLE if isinstance(port.slot.modulation.kind, TableModulation) else MODULATED
    return AFFINE if port.norm is not None else UNCHANGED
