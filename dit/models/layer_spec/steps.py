"""A layer as steps over named rows of tokens; families specify them and `StepLayer` runs them.

row         hidden states of tokens by name: `TOKENS` (latents), `TEXT_TOKENS`, `JOINT_TOKENS`,
            `SOUND_TOKENS`
port        where a module meets a row: how tokens enter it, and how its output is added to them
modulation  computes scales, shifts and gates for several ports, each of which has a slot in it
part        what is computed: attention, a feed-forward, or a family's own; its modules have ports
step        one part, or parts in parallel, which all read the rows as they were before the step
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
"""Names of rows of tokens: latents; text in networks with joint attention; both together."""
SOUND_TOKENS = "sound_hidden"
"""Name of the row of sound tokens, which has a width of its own."""
_KINDS: Mapping[str, RowKind] = {
    TOKENS: RowKind.LATENTS,
    TEXT_TOKENS: RowKind.TEXT,
    JOINT_TOKENS: RowKind.JOINT,
    SOUND_TOKENS: RowKind.SOUND,
}


@dataclass(frozen=True, slots=True)
class Modulation:
    """A module that computes scales, shifts and gates for some ports of a layer.

    `modulation[i]` is the slot of its i-th port.
    """

    name: str
    kind: ModulationSpec
    shifted: bool = True
    tanh: bool = False
    """Whether gates pass through tanh before they are applied."""

    def __getitem__(self, number: int) -> Slot:
        return Slot(self, number)


@dataclass(frozen=True, slots=True)
class Slot:
    """The scale, shift and gate with index `number` among those of a modulation."""

    modulation: Modulation
    number: int


class NormKind(StrEnum):
    """Kind of a norm that is a separate module, unlike a slot's norm without weights."""

    LAYER = "layer"
    RMS = "rms"
    CENTRED = "centred"  # an RMSNorm whose weights are stored less 1
    BARE = "bare"  # an RMSNorm without weights, for a port without a slot


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A norm before or after a part's module, with the name that it has in the layer."""

    name: str
    kind: NormKind = NormKind.RMS
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Port:
    """How a part's module reads a row of tokens h and adds its output to it.

    x = norm(h) * (1 + scale) + shift; h = h + gate * after(module(x))
    """

    row: str
    module: str = ""
    """The module's name in checkpoints; empty if the part has no module, or several with fixed
    names."""
    slot: Slot | None = None
    """Scale, shift and gate; None: tokens are neither scaled nor gated."""
    norm: RowNorm | None = None
    """Norm before the module. None: with a slot, a norm without weights, inside the modulation's
    kernel; without a slot, no norm."""
    after: RowNorm | None = None
    """Norm of the module's output before it is added (sandwich norm)."""
    writes: bool = True
    """Whether the module's output is added to the row; if not, the module only reads the row."""


@dataclass(frozen=True)
class LayerPart:
    """A computation on the tokens of a layer's rows, such as attention or a feed-forward."""

    runs: ClassVar[str]
    """The class that computes the part, as `module:class` (`dit.models.stacks.parts`). It is a
    string, because specifications need no torch."""
    port: Port

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.port,)

    @property
    def width(self) -> int:
        """Width of the tokens that enter the part by its first port."""
        raise NotImplementedError

    def width_of(self, port: Port) -> int:  # noqa: ARG002
        """Width of the tokens that enter the part by `port`."""
        return self.width

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """An `AttentionShape` for each attention of the part, with the kinds of its tokens."""
        return ()

    @property
    def exchanges(self) -> int:
        """Number of tensor-parallel exchanges in a pass.

        In one exchange inputs are gathered, divided matrices compute, and outputs are scattered.
        """
        return 0


@dataclass(frozen=True)
class Attend(LayerPart):
    """Attention within a sample: over one row, or over two rows with separate weights."""

    runs: ClassVar[str] = "dit.models.stacks.parts:SelfAttending"
    attention: AttentionSpec
    joined: Port | None = None
    """The port of the second row of joint attention; None: attention over one row."""

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
        """Fraction of a sample's pairs of query and key that attend, if attention is among cubes.

        None: every token attends to all tokens of its sample.
        """
        return None


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows from which cross-attention makes keys, whole on every rank: text or image features."""

    width: int
    name: str = "text"
    each: int | None = None
    """Number of rows of each sample, if all samples have equally many; else None."""


@dataclass(frozen=True)
class AttendAcross(LayerPart):
    """Attention of the tokens of one row to those of another row, which may have another width.

    A sample without tokens in the row of `keys` gets zeros, without a bias.
    """

    runs: ClassVar[str] = "dit.models.stacks.parts:AttendingAcross"
    keys: Port
    """The port of the row that makes keys and values."""
    attention: AttentionSpec
    """Sizes of queries, keys and values; its `width` is that of all heads."""
    widths: tuple[int, int]
    """Width of the tokens that make queries, then of those that make keys and values."""

    @property
    def ports(self) -> tuple[Port, ...]:
        return self.port, self.keys

    @property
    def width(self) -> int:
        return self.widths[0]

    def width_of(self, port: Port) -> int:
        return self.widths[self.ports.index(port)]

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        queries, keys = (_KINDS[port.row] for port in self.ports)
        return (AttentionShape(width=self.attention.width, queries=queries, keys=keys),)

    @property
    def exchanges(self) -> int:
        return 1


@dataclass(frozen=True)
class AttendTo(LayerPart):
    """Cross-attention of a row's tokens to rows that no layer changes, such as text.

    Each of `keys` has separate keys, values and softmax; the outputs are added.
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
        """Number of hidden units of a token."""
        return self.feed_forward.hidden

    @property
    def exchanges(self) -> int:
        return self.feed_forward.exchanges


@dataclass(frozen=True)
class AttendAndFeed(LayerPart):
    """Attention and feed-forward in parallel on the same tokens, added with one gate (FLUX).

    One matrix computes queries, keys, values and the hidden units of the feed-forward, another maps
    attention and hidden units to the output.
    """

    runs: ClassVar[str] = "dit.models.stacks.parts:AttendingAndFeeding"
    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    fused: bool = False
    """Whether the first matrix is one linear in Diffusers, too (FLUX.2), and so has one adapter."""

    @property
    def width(self) -> int:
        return self.attention.width

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        rows = _KINDS[self.port.row]
        return (AttentionShape(width=self.width, queries=rows, keys=rows),)

    @property
    def hidden(self) -> int:
        """Number of hidden units of a token."""
        return self.feed_forward.hidden

    @property
    def exchanges(self) -> int:
        return self.feed_forward.exchanges


Step = LayerPart | tuple[LayerPart, ...]


@dataclass(frozen=True)
class View:
    """Which tokens of a row a layer sees, and which it changes."""

    runs: ClassVar[str]
    """The class that applies the view, a `dit.models.stacks.views.RunningView`, as
    `module:class`."""

    @property
    def row(self) -> str:
        """Name of the row that the layer sees in part."""
        return TOKENS

    @property
    def over(self) -> RowKind:
        """Kind of the tokens over which the layer runs."""
        return _KINDS[self.row]


@dataclass(frozen=True)
class PicturesAlone(View):
    """A view of the latents: the layer sees all tokens and leaves those of references unchanged."""

    runs: ClassVar[str] = "dit.models.stacks.views:SeeingPictures"


@dataclass(frozen=True)
class ReferencesAlone(View):
    """A view of the latents: the layer changes reference tokens alone.

    References of a sample attend to each other or not, as the family chooses.
    """

    runs: ClassVar[str] = "dit.models.stacks.views:SeeingReferences"
    idle: bool = False
    """Whether no sample of the run has references, so that the layer computes nothing."""

    @property
    def over(self) -> RowKind:
        return RowKind.REFERENCES


@dataclass(frozen=True)
class LayerSpec:
    """The steps of a layer, one after the other."""

    steps: tuple[Step, ...]
    view: View | None = None
    """The tokens that the layer sees and changes; None: all tokens of the layer's rows."""
    norms_first: bool = False
    """Whether the norms before all parts register first, and those after parts last; else modules
    register step by step. The gradient norm is summed in the order of registration."""

    @property
    def groups(self) -> tuple[tuple[LayerPart, ...], ...]:
        """The parts of each step, as a tuple even for a single part."""
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
        """Names of the rows that the layer's ports read or change."""
        return tuple(dict.fromkeys(port.row for port in self.ports))

    @property
    def over(self) -> RowKind:
        """Kind of the tokens over which the layer runs: that of its rows, or of its view."""
        if self.view is not None and len(self.rows) == 1:
            return self.view.over
        return reduce(or_, (_KINDS[row] for row in self.rows))

    @property
    def modulations(self) -> dict[Modulation, list[Port]]:
        """Each modulation, with the ports that have a slot in it."""
        found: dict[Modulation, list[Port]] = {}
        for port in self.ports:
            if port.slot is not None:
                found.setdefault(port.slot.modulation, []).append(port)
        return found

    def idle(self, unread: tuple[str, ...]) -> frozenset[Port]:
        """Ports whose output is never used if no later layer reads the rows `unread`."""
        read, found = {*self.rows} - {*unread}, set[Port]()
        for step in reversed(self.groups):
            found |= {port for part in step for port in part.ports if port.row not in read}
            entered = (part.ports for part in step if not found.issuperset(part.ports))
            read |= {port.row for ports in entered for port in ports}
        return frozenset(found)

    @property
    def among_cubes(self) -> Attend | None:
        """The layer's attention among cubes of tokens, or None."""
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
        """Number of tensor-parallel exchanges of the layer's first row of tokens.

        Exchanges of other rows coincide with them.
        """
        return sum(part.exchanges for part in self.parts if part.port.row == self.rows[0])
