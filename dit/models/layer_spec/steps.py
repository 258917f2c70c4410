"""A layer as steps over named rows of tokens, which networks write down and layers compute.

row         hidden states of tokens by name: `TOKENS` (latents), `TEXT_TOKENS`, `JOINT_TOKENS`,
            `SOUND_TOKENS`
port        where a module meets a row: how tokens enter it, and how its output is added to them
modulation  makes scales, shifts and gates of several ports, which take their slots of it
part        what is computed: attention, a feed-forward, or a family's own; its modules have ports
step        one part, or parts side by side, which all read the rows as they were before
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from operator import or_
from typing import ClassVar

from dit.models.layer_spec.parts import AttentionSpec, FeedForwardSpec, ModulationSpec, QkNorm
from dit.models.layer_spec.shapes import AttentionShape, RowKind

TOKENS, TEXT_TOKENS, JOINT_TOKENS = "hidden", "text_hidden", "joint"
"""Rows of tokens: latents; texts of networks with joint attention; both together in one row."""
SOUND_TOKENS = "sound_hidden"
"""The row of tokens of sound, which has a width of its own."""
_KINDS: Mapping[str, RowKind] = {
    TOKENS: RowKind.LATENTS,
    TEXT_TOKENS: RowKind.TEXT,
    JOINT_TOKENS: RowKind.JOINT,
    SOUND_TOKENS: RowKind.SOUND,
}


@dataclass(frozen=True, slots=True)
class Modulation:
    """A module that makes scales, shifts and gates of some ports of a layer.

    `modulation[0]` are those of its first port.
    """

    name: str
    kind: ModulationSpec
    shifted: bool = True
    tanh: bool = False
    """Whether gates are the tanh of what it makes."""

    def __getitem__(self, number: int) -> Slot:
        return Slot(self, number)


@dataclass(frozen=True, slots=True)
class Slot:
    """One scale, shift and gate of a modulation."""

    modulation: Modulation
    number: int


class NormKind(StrEnum):
    """A norm beside those of slots, which have no weights."""

    LAYER = "layer"
    RMS = "rms"
    CENTRED = "centred"  # an RMSNorm whose weights are stored less 1
    BARE = "bare"  # an RMSNorm without weights, for a port without a slot


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A norm, by the name of its module."""

    name: str
    kind: NormKind = NormKind.RMS
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Port:
    """Where the module of a part meets a row of tokens.

    x = norm(h) * (1 + scale) + shift;    h = h + gate * after(module(x))
    """

    row: str
    module: str = ""
    """Its name, as checkpoints have it; a part may have none, or several of fixed names."""
    slot: Slot | None = None
    """Scale, shift and gate; None: tokens are neither scaled nor gated."""
    norm: RowNorm | None = None
    """None: with a slot, the norm without weights that its kernel computes; without one, none."""
    after: RowNorm | None = None
    """Norm of the output (sandwich)."""
    writes: bool = True
    """Whether the module's output is added to the row; the part reads its tokens either way."""


@dataclass(frozen=True)
class LayerPart:
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
        """Width of the tokens that enter its ports, or the first of them."""
        raise NotImplementedError

    def width_of(self, port: Port) -> int:  # noqa: ARG002
        """Width of the tokens that enter one of its ports."""
        return self.width

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """Which tokens attend to which."""
        return ()

    @property
    def exchanges(self) -> int:
        """Times that tensor ranks gather tokens, compute with split matrices, and scatter them."""
        return 0


@dataclass(frozen=True)
class Attend(LayerPart):
    """Tokens attend to those of their sample: of one row, or of two rows with weights of each."""

    runs: ClassVar[str] = "dit.models.stacks.parts:SelfAttending"
    attention: AttentionSpec
    joined: Port | None = None
    """The other row."""

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.port,) if self.joined is None else (self.port, self.joined)

    @property
    def width(self) -> int:
        return self.attention.width

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        rows = _KINDS[self.port.row]
        if self.joined is not None:
            rows |= _KINDS[self.joined.row]
        return (AttentionShape(width=self.width, queries=rows, keys=rows),)

    @property
    def exchanges(self) -> int:
        return 1

    @property
    def in_one_kernel(self) -> bool:
        """Whether one kernel may both normalise and rotate queries and keys."""
        one = self.attention
        return one.norm is QkNorm.PER_HEAD and one.key_heads == one.heads

    @property
    def pairs(self) -> float | None:
        """Pairs of a query and a key for each pair of tokens, where cubes of tokens see others.

        None: every token sees all of its sample.
        """
        return None


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows that tokens attend to, whole on every rank: a caption, or what is made of images."""

    width: int
    name: str = "text"
    each: int | None = None
    """Rows of each sample, where all have as many."""


@dataclass(frozen=True)
class AttendTo(LayerPart):
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
    def attentions(self) -> tuple[AttentionShape, ...]:
        width = self.width
        return tuple(
            AttentionShape(width=width, keys=RowKind.TEXT)
            if rows.each is None
            else AttentionShape(width=width, keys=RowKind.SAMPLES, times=rows.each)
            for rows in self.keys
        )

    @property
    def exchanges(self) -> int:
        return 1


@dataclass(frozen=True)
class Feed(LayerPart):
    """The feed-forward of a row."""

    runs: ClassVar[str] = "dit.models.stacks.parts:Feeding"
    feed_forward: FeedForwardSpec

    @property
    def width(self) -> int:
        return self.feed_forward.width

    @property
    def hidden(self) -> int:
        """Hidden units of a token."""
        return self.feed_forward.hidden

    @property
    def exchanges(self) -> int:
        return self.feed_forward.exchanges


@dataclass(frozen=True)
class AttendAndFeed(LayerPart):
    """Attention and feed-forward of the same tokens, added with one gate (FLUX).

    One matrix makes queries, keys, values and the hidden units of the feed-forward, another takes
    attention and hidden units together.
    """

    runs: ClassVar[str] = "dit.models.stacks.parts:AttendingAndFeeding"
    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    fused: bool = False
    """Whether the first matrix is one linear in Diffusers (FLUX.2), with one adapter, too."""

    @property
    def width(self) -> int:
        return self.attention.width

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        rows = _KINDS[self.port.row]
        return (AttentionShape(width=self.width, queries=rows, keys=rows),)

    @property
    def hidden(self) -> int:
        """Hidden units of a token."""
        return self.feed_forward.hidden

    @property
    def exchanges(self) -> int:
        return self.feed_forward.exchanges


Step = LayerPart | tuple[LayerPart, ...]


@dataclass(frozen=True)
class View:
    """What a layer sees in the place of a row, and which of its tokens it writes."""

    runs: ClassVar[str]
    """Module and name of the class that makes it (`dit.models.stacks.views.RunningView`)."""

    @property
    def row(self) -> str:
        """Name of the row."""
        return TOKENS

    @property
    def over(self) -> RowKind:
        """What of the row the layer runs over."""
        return _KINDS[self.row]


@dataclass(frozen=True)
class PicturesAlone(View):
    """Latents of which the references stay as they are."""

    runs: ClassVar[str] = "dit.models.stacks.views:SeeingPictures"


@dataclass(frozen=True)
class ReferencesAlone(View):
    """The references among the latents, each alone or those of a sample together."""

    runs: ClassVar[str] = "dit.models.stacks.views:SeeingReferences"
    idle: bool = False
    """Whether no sample has any, so that nothing is computed."""

    @property
    def over(self) -> RowKind:
        return RowKind.REFERENCES


@dataclass(frozen=True)
class LayerSpec:
    """The steps of a layer, one after the other."""

    steps: tuple[Step, ...]
    view: View | None = None
    """None: it sees and writes all tokens of its rows."""
    norms_first: bool = False
    """Whether all norms before the parts register before them, and those behind them last; else
    modules register step by step. Sums in the norm of the gradient are in that order."""

    @property
    def groups(self) -> tuple[tuple[LayerPart, ...], ...]:
        """The parts of each step."""
        return tuple(step if isinstance(step, tuple) else (step,) for step in self.steps)

    @property
    def parts(self) -> Iterator[LayerPart]:
        for step in self.groups:
            yield from step

    @property
    def ports(self) -> Iterator[Port]:
        for part in self.parts:
            yield from part.ports

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows that the layer changes."""
        return tuple(dict.fromkeys(port.row for port in self.ports))

    @property
    def over(self) -> RowKind:
        """The tokens that the layer runs over: those of its rows, or what its view shows."""
        if self.view is not None and len(self.rows) == 1:
            return self.view.over
        return reduce(or_, (_KINDS[row] for row in self.rows))

    @property
    def modulations(self) -> dict[Modulation, list[Port]]:
        """Each modulation, and the ports that take its slots."""
        found: dict[Modulation, list[Port]] = {}
        for port in self.ports:
            if port.slot is not None:
                found.setdefault(port.slot.modulation, []).append(port)
        return found

    def idle(self, unread: tuple[str, ...]) -> frozenset[Port]:
        """Ports whose output nothing reads, where nothing reads these rows after the layer."""
        read, found = {*self.rows} - {*unread}, set[Port]()
        for step in reversed(self.groups):
            found |= {port for part in step for port in part.ports if port.row not in read}
            entered = (part.ports for part in step if not found.issuperset(part.ports))
            read |= {port.row for ports in entered for port in ports}
        return frozenset(found)

    @property
    def among_cubes(self) -> Attend | None:
        """Its attention among cubes of tokens, if it has one."""
        attends = (part for part in self.parts if isinstance(part, Attend))
        return next((one for one in attends if one.pairs), None)

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        shapes = tuple(shape for part in self.parts for shape in part.attentions)
        if self.over is not RowKind.REFERENCES:
            return shapes
        return tuple(replace(one, queries=self.over, keys=self.over) for one in shapes)

    @property
    def exchanges(self) -> int:
        """Exchanges of the first row; those of others count with them."""
        return sum(part.exchanges for part in self.parts if part.port.row == self.rows[0])
