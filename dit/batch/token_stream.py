"""`TokenStream`: the tokens of one modality (latents, or sound) of a pack's samples."""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens
# N samples in a pack; M rows of the table of noise levels; A axes of positions

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from dit.batch.methods import CleanTokens, ConditionLevels, KeptTokens, Parts, ReferenceGrids
from dit.batch.sample import Grid

Method = TypeVar("Method")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShard:
    """Which tokens of a pack, padding included, are on one context-parallel rank.

    By default the rank has an equal shard of every sample: number `index` of `count`.
    """

    index: int = 0  # of this part
    count: int = 1  # number of parts, all of equal size; 1 is the whole pack
    # Ring attention: two pieces of each sample, at equal distances from its start and its end
    halves: bool = False
    contiguous: bool = False  # one piece of the pack, wherever its samples begin and end

    def pieces(self, start: int, stop: int, *, total: int) -> tuple[tuple[int, int], ...]:
        """(first token, number of tokens) of each piece of a sample on this rank.

        Tokens are numbered in the whole pack of `total` tokens; the sample is [start, stop).
        """
        if self.contiguous:
            size = total // self.count
            first = max(start, self.index * size)
            return ((first, max(0, min(stop, (self.index + 1) * size) - first)),)
        if not self.halves:
            size = (stop - start) // self.count
            return ((start + self.index * size, size),)
        size = (stop - start) // (2 * self.count)
        places = (self.index, 2 * self.count - 1 - self.index)
        return tuple((start + place * size, size) for place in places)


WHOLE = SequenceShard()
"""The shard of a single rank: all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStream:
    """N samples laid end to end in one row of T tokens (THD).

    The tokens of a sample are those of its target latent, then those of its reference latents, then
    padding. The first tokens of the target may be clean, if its first frames condition the sample.
    Clean and reference tokens have no noise and no loss. Tensors with a T hold the tokens of
    `share`; all other fields describe the whole pack. A sample without data for the stream has a
    grid of no frames.
    """

    # bfloat16 or float32, whitened to std 1; C = channels * patch volume, order (c, t, h, w)
    latent_TC: Tensor
    position_TA: Tensor  # float32, such as (frame at 24 fps, row, column), inside the owning sample
    segment_T: Tensor  # int64 in [0, N): the sample that owns each token
    is_real_T: Tensor  # bool, False on alignment padding
    is_target_T: Tensor  # bool, True on tokens with noise and loss
    level_row_T: Tensor  # int64 in [0, M): the row of the noise level that each token gets
    condition_TC: Tensor | None = None  # channels that are appended to the noisy ones, as patches
    # Python integers, so that no step waits for a device to learn a length.
    grids: tuple[Grid, ...]  # of the targets
    starts: tuple[int, ...]  # N + 1 offsets of the samples in T, each a multiple of sample_multiple
    share: SequenceShard  # which tokens of the pack the tensors with a T hold
    # What methods add, by type (`methods.py`): `method(Route)` is None where no route is used
    methods: Mapping[type, Any]

    def method(self, kind: type[Method]) -> Method | None:
        """The value of the method `kind`; None if the pack does not use it."""
        return self.methods.get(kind)

    def with_method(self, value: object) -> Self:
        """A copy in which `value` replaces the value of the same method, if there is one."""
        return replace(self, methods={**self.methods, type(value): value})

    def without(self, *kinds: type) -> Self:
        """A copy without the values of the methods `kinds`."""
        left = {kind: value for kind, value in self.methods.items() if kind not in kinds}
        return self if len(left) == len(self.methods) else replace(self, methods=left)

    @property
    def num_samples(self) -> int:
        return len(self.grids)

    @property
    def references(self) -> tuple[tuple[Grid, ...], ...]:
        """Grids of each sample's reference latents."""
        found = self.method(ReferenceGrids)
        return ((),) * self.num_samples if found is None else found.of

    @property
    def clean_tokens(self) -> tuple[int, ...]:
        """Number of clean tokens at the beginning of each target: of frames that condition it."""
        clean = self.method(CleanTokens)
        return (0,) * self.num_samples if clean is None else clean.counts

    @property
    def num_levels(self) -> int:
        """M, the number of rows in the pack's table of noise levels.

        The table has a row for the level of each of the N samples, then N rows for their clean
        tokens if the pack may have any, then the rows of `ConditionLevels`.
        """
        more = self.method(ConditionLevels)
        return self.num_samples * (1 + (CleanTokens in self.methods)) + (more.rows if more else 0)

    @property
    def latent_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each whole target, even if the pack has only a part of the target."""
        return tuple(math.prod(grid) for grid in self.grids)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each sample, target and references together, without padding."""
        kept, references = self.method(KeptTokens), self.method(ReferenceGrids)
        if kept is not None:
            return kept.counts
        if references is None:
            return self.latent_tokens
        pairs = zip(self.latent_tokens, references.of, strict=True)
        return tuple(own + sum(map(math.prod, others)) for own, others in pairs)

    @property
    def real_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def loss_tokens(self) -> tuple[int, ...]:
        """Number of tokens with a loss, for each sample."""
        own = zip(self._targets, self.clean_tokens, strict=True)
        return tuple(tokens - given for tokens, given in own)

    @property
    def _targets(self) -> tuple[int, ...]:
        """Number of target tokens of each sample; of a part of a sample (`Parts`), only its own."""
        parts = self.method(Parts)
        return self.latent_tokens if parts is None else parts.targets

    @property
    def has_given_tokens(self) -> bool:
        """Whether the pack has real tokens without noise and loss."""
        return any(self.references) or any(self.clean_tokens)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the name of their field; a tensor in a mapping is named `field.name`.

        A tensor of a method is named `Type.field`, one of another stream `others.stream.field`.
        """
        return dict(_tensors_of(self))

    @property
    def token_tensors(self) -> dict[str, Tensor]:
        """Tensors with a row for each token (names in `_T...`), by their names in `tensors`."""
        found = ((n, x) for n, x in self.tensors.items() if n.partition(".")[0] not in _BY_NAME)
        return {n: x for n, x in found if n.rpartition("_")[2].startswith("T")}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """A copy in which `tensors` replace those of the same names in the property `tensors`."""
        changes: dict[str, Any] = {}
        kinds = {kind.__name__: kind for kind in self.methods}
        for name, tensor in tensors.items():
            outer, _, inner = name.partition(".")
            if outer in kinds:
                methods = changes.setdefault("methods", dict(self.methods))
                own = methods[kinds[outer]]
                methods[kinds[outer]] = replace(own, **{inner: tensor})
            elif inner:
                own = changes.setdefault(outer, dict(getattr(self, outer)))
                stream, _, field = inner.partition(".")
                if isinstance(of_stream := own.get(stream), TokenStream):
                    own[stream] = of_stream.with_tensors({field: tensor})
                else:
                    own[inner] = tensor
            else:
                changes[outer] = tensor
        return replace(self, **changes)

    def with_tokens(self, rows_T: Tensor) -> Self:
        """A copy whose tensors hold only the tokens at `rows_T`."""
        return self.with_tensors({n: tensor[rows_T] for n, tensor in self.token_tensors.items()})

    @property
    def shared_spans(self) -> tuple[tuple[int, int], ...]:
        """(first token, number of real tokens) of each sample, as rows of this rank's tensors."""
        # Real tokens come first in a sample, and therefore in its pieces as well.
        here = self._tokens_here([(0, real) for real in self.num_tokens])
        sizes = (sum(size for _, size in pieces) for pieces in self._pieces(self.share))
        return tuple(zip(accumulate(sizes, initial=0), here, strict=False))

    @property
    def shared_loss_tokens(self) -> tuple[int, ...]:
        """Number of tokens with a loss on this rank, for each sample."""
        ends = zip(self._targets, self.loss_tokens, strict=True)
        return self._tokens_here([(stop - count, stop) for stop, count in ends])

    @property
    def shared_latent_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each sample's target on this rank, clean ones included."""
        return self._tokens_here([(0, tokens) for tokens in self.latent_tokens])

    def _tokens_here(self, spans: list[tuple[int, int]]) -> tuple[int, ...]:
        """Number of tokens on this rank in the span [first, stop) of each sample."""
        counts = []
        samples = zip(self.starts, self._pieces(self.share), spans, strict=False)
        for start, pieces, (first, stop) in samples:
            overlaps = (
                min(start + stop, at + size) - max(start + first, at) for at, size in pieces
            )
            counts.append(sum(max(overlap, 0) for overlap in overlaps))
        return tuple(counts)

    def _pieces(self, share: SequenceShard) -> list[tuple[tuple[int, int], ...]]:
        """(first token, number of tokens) of the pieces of each sample on the rank of `share`."""
        total = self.starts[-1]
        return [share.pieces(*sample, total=total) for sample in pairwise(self.starts)]

    def rows(self, share: SequenceShard) -> Tensor:
        """Indices in the whole pack of the tokens of `share`, in the order of its tensors."""
        pieces = (piece for sample in self._pieces(share) for piece in sample)
        return torch.cat([torch.arange(first, first + size) for first, size in pieces])


_BY_NAME = ("texts", "vectors", "others")
"""Fields that map names to tensors which have no row for each token."""


def _tensors_of(stream: TokenStream) -> Iterator[tuple[str, Tensor]]:
    for one in fields(stream):
        value = getattr(stream, one.name)
        if isinstance(value, Tensor):
            yield one.name, value
        elif one.name == "methods":
            for kind, own in value.items():
                of_kind = ((f"{kind.__name__}.{f.name}", getattr(own, f.name)) for f in fields(own))
                yield from ((name, x) for name, x in of_kind if isinstance(x, Tensor))
        elif isinstance(value, Mapping):
            for name, own in value.items():
                each = own.tensors if isinstance(own, TokenStream) else {"": own}
                parts = ((f"{one.name}.{name}.{n}".rstrip("."), x) for n, x in each.items())
                yield from ((place, x) for place, x in parts if isinstance(x, Tensor))
