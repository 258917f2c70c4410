"""Arrangements: permutations that turn Diffusers' tensors into ours and back.

An arrangement only moves numbers, so a round trip restores every bit. In names, "theirs" means
Diffusers' tensors and their order of numbers, "ours" the tensors of our network.
"""

# D model width, K head width, H heads; c t h w channel, frame, row, column of a token's features
# I inputs of a linear, O outputs; F width of a feed-forward; C numbers in a token, c * t * h * w
# X any width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dit.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


class Arrangement(Protocol):
    """Interface of an arrangement: `join` maps Diffusers' tensors to ours, `split` inverts it."""

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:
        """Our tensor, computed from Diffusers' tensors `parts`."""
        ...

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:
        """The `count` tensors of Diffusers for our tensor `whole`: the inverse of `join`."""
        ...

    def their_shapes(
        self, shape: tuple[int, ...], model: ModelConfig, count: int
    ) -> list[tuple[int, ...]]:
        """Shapes of the `count` tensors of Diffusers for our tensor of this `shape`."""
        ...

    @property
    def of_inputs(self) -> bool:
        """Whether the arrangement permutes columns (inputs) of a matrix instead of rows."""
        ...

    @property
    def of_bias(self) -> Arrangement:
        """The arrangement of the bias of a linear whose weight has this arrangement."""
        ...

    def groups(self, model: ModelConfig) -> int:
        """Number of groups of rows in our tensor, such as heads.

        Each group has rows of every Diffusers tensor.
        """
        ...

    def linears(self, rows: int, model: ModelConfig) -> list[int]:
        """Number of rows of each linear that a Diffusers matrix with `rows` rows fuses."""
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """The identity: our tensor and Diffusers' are equal."""

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:  # noqa: ARG002
        return parts[0]

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [whole]

    def their_shapes(
        self,
        shape: tuple[int, ...],
        model: ModelConfig,  # noqa: ARG002
        count: int,  # noqa: ARG002
    ) -> list[tuple[int, ...]]:
        return [shape]

    @property
    def of_inputs(self) -> bool:
        return False

    @property
    def of_bias(self) -> Arrangement:
        return SAME if self.of_inputs else self

    def groups(self, model: ModelConfig) -> int:  # noqa: ARG002
        return 1

    def linears(self, rows: int, model: ModelConfig) -> list[int]:  # noqa: ARG002
        return [rows]


SAME = Same()


@dataclass(frozen=True, slots=True)
class ByHead(Same):
    """Separate linears of queries, keys and values in Diffusers; one linear, head by head, in ours.

    Diffusers' weights are [H * K, I] and its biases [H * K]; our tensor has all rows, first those
    of the first head. The last Diffusers tensor may have more rows per head, such as the
    feed-forward of a single-stream layer.

    The tensors with indices in `rotated` have rotary pairs (2i, 2i + 1) in Diffusers and
    (i, i + K/2) in ours. The same permutation of queries and keys leaves their products unchanged.
    """

    rotated: tuple[int, ...] = ()

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:
        parts = [
            to_halves(part, model) if index in self.rotated else part
            for index, part in enumerate(parts)
        ]
        heads = [part.unflatten(0, (self.groups(model), -1)) for part in parts]
        return _cat(heads, dim=1).flatten(0, 1)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:
        heads = whole.unflatten(0, (self.groups(model), -1))
        widths = self.widths(heads.shape[1], model, count)
        parts = [part.flatten(0, 1) for part in heads.split(widths, dim=1)]
        return [
            to_pairs(part, model) if index in self.rotated else part
            for index, part in enumerate(parts)
        ]

    def their_shapes(
        self, shape: tuple[int, ...], model: ModelConfig, count: int
    ) -> list[tuple[int, ...]]:
        groups = self.groups(model)
        widths = self.widths(shape[0] // groups, model, count)
        return [(groups * width, *shape[1:]) for width in widths]

    def groups(self, model: ModelConfig) -> int:
        return model.num_attention_heads

    def widths(self, each_head: int, model: ModelConfig, count: int) -> list[int]:
        """Rows that each of `count` Diffusers tensors has in one head, of `each_head` in all."""
        width = model.hidden_size // model.num_attention_heads
        return [*(width,) * (count - 1), each_head - (count - 1) * width]


@dataclass(frozen=True, slots=True)
class ByOwnHead(ByHead):
    """`ByHead` for layers with a number of heads, or a width, of their own (such as sound's)."""

    heads: str = "num_attention_heads"  # field of the configuration with H
    width: str = "sound_hidden_size"  # field with H * K

    def groups(self, model: Any) -> int:
        return getattr(model, self.heads)

    def widths(self, each_head: int, model: Any, count: int) -> list[int]:
        width = getattr(model, self.width) // self.groups(model)
        return [*(width,) * (count - 1), each_head - (count - 1) * width]


@dataclass(frozen=True, slots=True)
class ByKeyHead(ByHead):
    """`ByHead` for grouped-query attention: a group is a key head with its query heads.

    Diffusers' queries, keys and values are [H * K, I], [G * K, I] and [G * K, I], with G key heads;
    our tensor has all rows, group by group. A fourth Diffusers tensor is a gate of the output, with
    as many rows as queries.
    """

    heads: str = "num_attention_heads"  # field of the configuration with H
    key_heads: str = "num_kv_heads"  # field with G
    width: str = "hidden_size"  # field with H * K

    def groups(self, model: ModelConfig) -> int:
        return getattr(model, self.key_heads)

    def widths(self, each_head: int, model: ModelConfig, count: int) -> list[int]:
        width = getattr(model, self.width) // getattr(model, self.heads)
        queries = (each_head - 2 * width) // (count - 2)
        return [queries, width, width, *(queries,) * (count - 3)]


@dataclass(frozen=True, slots=True)
class GatesAndValues(ByHead):
    """First linear of a SwiGLU, [2 * F, I]: two linears in Diffusers, alternating rows in ours.

    With alternating rows, each tensor rank gets the gates of its values.
    """

    hidden: str = "ffn_hidden_size"  # field of the configuration with F

    def groups(self, model: ModelConfig) -> int:
        return getattr(model, self.hidden)

    def widths(self, each_head: int, model: ModelConfig, count: int) -> list[int]:  # noqa: ARG002
        return [each_head // count] * count


@dataclass(frozen=True, slots=True)
class GatesThenValues(Same):
    """First linear of a SwiGLU, [2 * F, I], or its bias: one fused linear in Diffusers.

    Diffusers' rows are all gates, then all values; ours alternate, as for `GatesAndValues`.
    """

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:  # noqa: ARG002
        return by_turns(parts[0])

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [in_halves(whole)]

    def linears(self, rows: int, model: ModelConfig) -> list[int]:  # noqa: ARG002
        return [rows // 2] * 2


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    from torch import cat  # imported late: names and shapes of tables are told without torch

    return cat(tuple(parts), dim)


def by_turns(x: Tensor) -> Tensor:
    """`x` [2 * F, ...] with alternating rows of its first and second half."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def in_halves(x: Tensor) -> Tensor:
    """`x` [2 * F, ...] with its even rows first, then its odd rows: the inverse of `by_turns`."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class FusedHeads(Same):
    """First linear of a single-stream layer, [3 * D + 2 * F, I]: q, k, v, and a SwiGLU.

    Diffusers has all queries first, then keys, values, gates and hidden values. Ours is ordered
    head by head (`ByHead`), and the gates and hidden values of a head alternate. Queries and keys
    are rotated, so their rotary pairs are reordered, too.
    """

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:
        *qkv, wide = parts[0].tensor_split([n * model.hidden_size for n in (1, 2, 3)])
        return _BY_HEAD.join([*qkv, by_turns(wide)], model)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        *qkv, wide = _BY_HEAD.split(whole, model, 4)
        return [_cat([*qkv, in_halves(wide)])]

    def linears(self, rows: int, model: ModelConfig) -> list[int]:
        qkv = [model.hidden_size] * 3
        return [*qkv, *[(rows - sum(qkv)) // 2] * 2]


_BY_HEAD = ByHead(rotated=(0, 1))


@dataclass(frozen=True, slots=True)
class HeadColumns(Same):
    """Output linear of a single-stream layer, [D, D + F], of attention and feed-forward.

    In Diffusers the columns of attention come first, then those of the feed-forward. In ours they
    are ordered head by head: a head's columns of attention, then its columns of the feed-forward.
    """

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:
        heads = model.num_attention_heads
        both = parts[0].tensor_split([model.hidden_size], dim=-1)
        return _cat([part.unflatten(-1, (heads, -1)) for part in both], dim=-1).flatten(-2)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        heads = model.num_attention_heads
        both = whole.unflatten(-1, (heads, -1)).tensor_split([model.hidden_size // heads], dim=-1)
        return [_cat([part.flatten(-2) for part in both], dim=-1)]

    @property
    def of_inputs(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RotaryPairs(Same):
    """Weight of a norm of rotated queries or keys: [K] for each head, or [H * K] across heads.

    Rotary pairs are (2i, 2i + 1) in Diffusers and (i, i + K/2) in ours.
    """

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:
        return to_halves(parts[0], model)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [to_pairs(whole, model)]


def to_halves(x: Tensor, model: ModelConfig) -> Tensor:
    """`x` [H * K, ...] with the rows of each head in the order (0, 2, 4, ..., 1, 3, 5, ...)."""
    width = model.hidden_size // model.num_attention_heads
    return x.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(x: Tensor, model: ModelConfig) -> Tensor:
    """`x` with the rows of each head in Diffusers' order: the inverse of `to_halves`."""
    width = model.hidden_size // model.num_attention_heads
    return x.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Features(Same):
    """Linear whose outputs or inputs are the features of a token, in another order than ours.

    `theirs` is Diffusers' order, such as "thwc"; ours is "cthw". `axis` 0 permutes output features
    (weight [C, I] and bias [C]), `axis` 1 input features (weight [O, C]).
    """

    theirs: str
    axis: int = 0

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:
        return self._permuted(parts[0], model, before=self.theirs, after=_OURS)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [self._permuted(whole, model, before=_OURS, after=self.theirs)]

    @property
    def of_inputs(self) -> bool:
        return self.axis == 1

    def _permuted(self, x: Tensor, model: ModelConfig, *, before: str, after: str) -> Tensor:
        side = model.patch_spatial
        sizes = {"c": -1, "t": model.patch_temporal, "h": side, "w": side}
        split = x.movedim(self.axis, 0).unflatten(0, [sizes[letter] for letter in before])
        order = [before.index(letter) for letter in after]
        rest = range(len(_OURS), split.dim())
        return split.permute(*order, *rest).flatten(0, len(_OURS) - 1).movedim(0, self.axis)


_OURS = "cthw"
THWC = "thwc"
"""Order of a token's features in most Diffusers networks: frames, rows, columns, channels."""


@dataclass(frozen=True, slots=True)
class Convolution(Same):
    """Patch embedding: a convolution [D, c, t, h, w] in Diffusers, a linear [D, C] in ours."""

    axes: int = 3  # 2 for convolutions of pictures, [D, c, h, w]

    @property
    def of_bias(self) -> Arrangement:
        return SAME

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:  # noqa: ARG002
        return parts[0].flatten(1)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:
        return [whole.reshape(*self.their_shapes(tuple(whole.shape), model, count))]

    def their_shapes(
        self,
        shape: tuple[int, ...],
        model: ModelConfig,
        count: int,  # noqa: ARG002
    ) -> list[tuple[int, ...]]:
        patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)[3 - self.axes :]
        return [(shape[0], shape[1] // math.prod(patch), *patch)]


@dataclass(frozen=True, slots=True)
class LeadingOne(Same):
    """A table of shape [1, rows, X] in Diffusers and [rows, X] in ours."""

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:  # noqa: ARG002
        return parts[0][0]

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [whole[None]]

    def their_shapes(
        self,
        shape: tuple[int, ...],
        model: ModelConfig,  # noqa: ARG002
        count: int,  # noqa: ARG002
    ) -> list[tuple[int, ...]]:
        return [(1, *shape)]


@dataclass(frozen=True, slots=True)
class SwappedHalves(Same):
    """Linear whose two halves of outputs or inputs are swapped between Diffusers and ours.

    `axis` 0 swaps outputs: the modulation of the last norm, weight [2 * D, I] and bias [2 * D], is
    (scale, shift) in Diffusers and (shift, scale) in ours. `axis` 1 swaps inputs: a linear of a
    sinusoid, [O, I], has inputs (sine, cosine) in Diffusers and (cosine, sine) in ours.
    """

    axis: int = 0

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:  # noqa: ARG002
        return _cat(parts[0].chunk(2, self.axis)[::-1], self.axis)

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [_cat(whole.chunk(2, self.axis)[::-1], self.axis)]

    @property
    def of_inputs(self) -> bool:
        return self.axis == 1


@dataclass(frozen=True, slots=True)
class ScaleFirst(Same):
    """Modulation of a layer: (scale, shift, gate) twice in Diffusers, (shift, scale, gate) in ours.

    The tensor is a weight [6 * D, I], its bias [6 * D], or a table [6, D] of each layer.
    """

    def join(self, parts: list[Tensor], model: ModelConfig) -> Tensor:  # noqa: ARG002
        return self._exchanged(parts[0])

    def split(self, whole: Tensor, model: ModelConfig, count: int) -> list[Tensor]:  # noqa: ARG002
        return [self._exchanged(whole)]

    @staticmethod
    def _exchanged(x: Tensor) -> Tensor:
        vectors = x.chunk(6)
        return _cat([vectors[n] for n in (1, 0, 2, 4, 3, 5)])
