"""A layer as a sequence of steps; families specify the steps, and `StepLayer` runs them.

row         a stream of tokens with a name: `TOKENS` (latents), `TEXT_TOKENS`, `JOINT_TOKENS` or
            `SOUND_TOKENS`
port        a connection of a module to a row: norm, scale and shift of the module's input; gate of
            its output, which is added to the row
modulation  a module that computes scales, shifts and gates; a slot is those of one port
part        a computation with one or more ports, such as attention or a feed-forward
step        one part, or several parts that all read the rows as they were before the step
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
"""Names of rows of tokens: latents; text in networks with joint attention; latents and text as one
sequence."""
SOUND_TOKENS = "sound_hidden"
"""Name of the row of sound tokens, whose width differs from that of latents."""
_KINDS: Mapping[str, RowKind] = {
    TOKENS: RowKind.LATENTS,
    TEXT_TOKENS: RowKind.TEXT,
    JOINT_TOKENS: RowKind.JOINT,
    SOUND_TOKENS: RowKind.SOUND,
}


@dataclass(frozen=True, slots=True)
class Modulation:
    """A module that computes scales, shifts and gates for several ports of a layer.

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
    """The scale, shift and gate that a modulation computes for its `number`-th port."""

    modulation: Modulation
    number: int


class NormKind(StrEnum):
    """Kind of a norm that is a separate module of a layer."""

    LAYER = "layer"
    RMS = "rms"
    CENTRED = "centred"  # an RMSNorm that stores weight - 1
    BARE = "bare"  # an RMSNorm without weights, for a port without a slot


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A norm before or after the module of a port."""

    name: str
    kind: NormKind = NormKind.RMS
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Port:
    """The connection of a part's module to a row of tokens h.

    x = norm(h) * (1 + scale) + shift; h = h + gate * after(module(x))
    """

    row: str
    module: str = ""
    """The module's name in the layer; empty if the part has no module, or several modules with
    fixed names."""
    slot: Slot | None = None
    """Scale, shift and gate; None: no scale, shift or gate."""
    norm: RowNorm | None = None
    """Norm of the module's input. None: if there is a slot, a norm without weights, which the
    kernel of scale and shift computes; if there is no slot, no norm."""
    after: RowNorm | None = None
    """Norm of the module's output, before the output is added (sandwich norm); None: no norm."""
    writes: bool = True
    """Whether the module's output is added to the row; if not, the module only reads the row."""


@dataclass(frozen=True)
class LayerPart:
    """A computation on the tokens of a layer, such as attention or a feed-forward."""

    runs: ClassVar[str]
    """The class that computes the part, a `RunningPart`, as `module:class`. It is a string, because
    specifications do not import torch."""
    port: Port

    @property
    def ports(self) -> tuple[Port, ...]:
        return (self.port,)

    @property
    def width(self) -> int:
        """Width of the tokens of the first port."""
        raise NotImplementedError

    def width_of(self, port: Port) -> int:  # noqa: ARG002
        """Width of the tokens of `port`."""
        return self.width

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """The shape of each attention of the part; empty if it has none."""
        return ()

    @property
    def exchanges(self) -> int:
        """Number of tensor-parallel exchanges in a forward pass.

        An exchange is a gather of a module's inputs and a reduce-scatter of its outputs.
        """
        return 0


@dataclass(frozen=True)
class Attend(LayerPart):
    """Self-attention within a sample: over one row, or over two rows with separate weights."""

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
        """Whether the kernel `rotated_heads` can normalise and rotate queries and keys."""
        one = self.attention
        return one.norm is QkNorm.PER_HEAD and one.key_heads == one.heads

    @property
    def pairs(self) -> float | None:
        """The fraction of (query, key) pairs that attend in video sparse attention.

        None: every token attends to all tokens of its sample.
        """
        return None


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Encoder states from which cross-attention computes keys and values; all are on each rank."""

    width: int
    name: str = "text"
    each: int | None = None
    """Number of rows of each sample, if it is the same for all samples; else None."""


@dataclass(frozen=True)
class AttendAcross(LayerPart):
    """Attention of one row's tokens to those of another row, such as of latents to sound.

    For a sample without tokens in the row of `keys` the output is 0 (also without the bias).
    """

    runs: ClassVar[str] = "dit.models.stacks.parts:AttendingAcross"
    keys: Port
    """The port of the row from which keys and values are computed."""
    attention: AttentionSpec
    """Sizes of queries, keys and values; its `width` is the width of all heads together."""
    widths: tuple[int, int]
    """(width of the tokens of queries, width of the tokens of keys and values)."""

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
    """Cross-attention of a row's tokens to encoder states that no layer changes, such as text.

    Each element of `keys` has separate keys, values and softmax; the outputs are added.
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
    """A feed-forward on the tokens of a row."""

    runs: ClassVar[str] = "dit.models.stacks.parts:Feeding"
    feed_forward: FeedForwardSpec

    @property
    def width(self) -> int:
        return self.feed_forward.width

    @property
    def hidden(self) -> int:
        """Number of hidden units that are computed for a token."""
        return self.feed_forward.hidden

    @property
    def exchanges(self) -> int:
        return self.feed_forward.exchanges


@dataclass(frozen=True)
class AttendAndFeed(LayerPart):
    """Attention and feed-forward in parallel on the same tokens, as in FLUX's single-stream layers.

    One linear computes queries, keys, values and the hidden units of the feed-forward. Another
    computes the output from the results of attention and the hidden units.
    """

    runs: ClassVar[str] = "dit.models.stacks.parts:AttendingAndFeeding"
    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    fused: bool = False
    """Whether the first linear is also one linear in Diffusers (FLUX.2), so that it has one
    adapter."""

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
    """A restriction of a layer: which tokens of a row it gets, and which it changes."""

    runs: ClassVar[str]
    """The class that applies the view, a `RunningView`, as `module:class`."""

    @property
    def row(self) -> str:
        """Name of the row to which the view applies."""
        return TOKENS

    @property
    def over(self) -> RowKind:
        """Kind of the tokens that the layer processes."""
        return _KINDS[self.row]


@dataclass(frozen=True)
class PicturesAlone(View):
    """A view of latents: the layer processes all tokens, but changes no tokens of references."""

    runs: ClassVar[str] = "dit.models.stacks.views:SeeingPictures"


@dataclass(frozen=True)
class ReferencesAlone(View):
    """A view of latents: the layer changes only the tokens of references.

    The network (`references_meet`) decides whether references of a sample attend to each other.
    """

    runs: ClassVar[str] = "dit.models.stacks.views:SeeingReferences"
    idle: bool = False
    """Whether the layer is skipped, because no sample of the run has references."""

    @property
    def over(self) -> RowKind:
        return RowKind.REFERENCES


@dataclass(frozen=True)
class LayerSpec:
    """The specification of a layer: its steps, in order."""

    steps: tuple[Step, ...]
    view: View | None = None
    """The tokens that the layer gets and changes; None: all tokens of its rows."""
    norms_first: bool = False
    """Order in which the layer's modules are registered, and thus in which the gradient norm is
    summed. True: norms before parts, then parts, then norms after parts; False: step by step."""

    @property
    def groups(self) -> tuple[tuple[LayerPart, ...], ...]:
        """The parts of each step; a step with a single part is a tuple of one."""
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
        """Names of the rows of the layer's ports."""
        return tuple(dict.fromkeys(port.row for port in self.ports))

    @property
    def over(self) -> RowKind:
        """Kind of the tokens that the layer processes, by its view or its rows."""
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
        """Ports whose output is not used if no later layer reads the rows `unread`."""
        read, found = {*self.rows} - {*unread}, set[Port]()
        for step in reversed(self.groups):
            found |= {port for part in step for port in part.ports if port.row not in read}
            entered = (part.ports for part in step if not found.issuperset(part.ports))
            read |= {port.row for ports in entered for port in ports}
        return frozenset(found)

    @property
    def among_cubes(self) -> Attend | None:
        """The layer's part with video sparse attention, or None."""
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
        """Number of tensor-parallel exchanges for the layer's first row of tokens.

        Exchanges for other rows happen at the same time.
        """
        return sum(part.exchanges for part in self.parts if part.port.row == self.rows[0])
