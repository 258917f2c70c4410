"""The three values that cross folder borders.

A `LatentSample` is a sample of a shard; the loader hands `PackedBatch`es to the step; an objective
poses a `Problem` to the network. All three are frozen.
"""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; M level rows; E text width; A axes of positions; D model width
# F H W frames, rows and columns of a latent

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

TEXT = "text"
"""The main text input of every family, by its name in a shard."""
NULL_TEXT = "null_text"
"""A sample's own replacement of `text` for a dropped caption; its text encoder sees pictures."""
REJECTED_LATENT = "rejected_latent"
"""The latent that people like less than `latent`, of the same shape, by its name in a shard."""
NullInputs = Mapping[str, Tensor]
"""Inputs by name that replace those of a sample whose caption is dropped.

An input that is absent keeps the sample's own value.
"""
Grid = tuple[int, int, int]
"""Frames, rows and columns, in patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSample:
    """One encoded image or video with its caption, as in a shard."""

    key: str  # unique in its dataset; part of the pack identity
    latent_CFHW: Tensor  # float, whitened to unit variance per channel
    text_LE: Tensor  # float, true length
    fps: float  # frames per second of the latent's pixels; NaN for an image or unknown
    caption: str = ""
    source: str = ""  # name of the dataset in a blend
    loss_weight: float = 1.0  # multiplies the loss of the sample; at least 0
    loss_mask_1FHW: Tensor | None = None  # float, at least 0: multiplies that of each latent cell
    # Log variance of each number of the latent, whose mean `latent_CFHW` is; None: there is no draw
    latent_logvar_CFHW: Tensor | None = None
    # Of validation with a fixed level for each sample: k of the level k / 8; None: it has none
    level_index: int | None = None
    # What the family reads beside latent and text, by name, as far as the sample has it
    others: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # names of tensors in its record that the family does not read

    @property
    def is_weighted(self) -> bool:
        """Whether the losses of its tokens have weights other than 1."""
        return self.loss_weight != 1 or self.loss_mask_1FHW is not None

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """All inputs besides the latent, by name."""
        return {TEXT: self.text_LE, **self.others}


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShard:
    """The tokens of a pack, padding included, that one context-parallel rank has.

    By default they are an equal part of every sample: `count` parts, of which this is `index`.
    """

    index: int = 0  # of this part
    count: int = 1  # number of parts, all of equal size; 1 is the whole pack
    # Ring attention: two pieces of each sample, one as far from its start as the other from its end
    halves: bool = False
    contiguous: bool = False  # one piece of the pack, whatever it has of a sample

    def pieces(self, start: int, stop: int, *, total: int) -> tuple[tuple[int, int], ...]:
        """(first token, number of tokens) of each piece of a sample on this context rank."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """N samples laid end to end in one row of T tokens (THD).

    The tokens of a sample are those of its latent, which is the target of training, then those of
    its reference latents, then padding. Tokens at the beginning of the target may be clean: frames
    that are given. Clean and reference tokens get no noise and have no loss.

    Tensors with a T hold the tokens of `share`; everything else describes the whole pack.
    """

    # bfloat16 or float32, whitened to std 1; C = channels * patch volume, order (c, t, h, w)
    latent_TC: Tensor
    # Log variance of each number of the latent, float, -inf for none; `latent_TC` holds means then,
    # of which a step draws its latents. None: those are the latents
    latent_logvar_TC: Tensor | None = None
    position_TA: Tensor  # float32, such as (frame at 24 fps, row, column), inside the owning sample
    segment_T: Tensor  # int64 in [0, N): the sample that owns each token
    is_real_T: Tensor  # bool, False on alignment padding
    is_target_T: Tensor  # bool, True on tokens with noise and loss
    level_row_T: Tensor  # int64 in [0, M): the row of the noise level that each token gets
    # float32, at least 0: multiplies the loss of each target token, and means nothing elsewhere.
    # What a loss is divided by stays the number of target tokens. None: all are 1
    weight_T: Tensor | None = None
    condition_TC: Tensor | None = None  # channels that are appended to the noisy ones, as patches
    # By the names of the inputs; of a family's text inputs each is here, also where all are empty.
    texts: Mapping[
        str, Tensor
    ]  # [L, E], bfloat16 or float32: rows of the N samples laid end to end
    text_offsets: Mapping[str, tuple[int, ...]]  # N + 1 offsets of the samples in L
    vectors: Mapping[str, Tensor] = field(default_factory=dict)  # [N, E], such as pooled text
    # [M, E] and N + 1 offsets in it: in the place of the main text of a dropped caption, where a
    # sample has such rows of its own. They are no tokens. None: no sample has any
    null_text_LE: Tensor | None = None
    null_text_starts: tuple[int, ...] = ()
    fps_N: Tensor  # float32, frames per second; NaN for an image or unknown
    # Python integers, so that no step waits for a device to learn a length.
    grids: tuple[Grid, ...]  # of the targets
    references: tuple[tuple[Grid, ...], ...] = ()  # of each sample's reference latents; () for none
    clean_tokens: tuple[int, ...] = ()  # of each target, at its beginning; () for none
    # Noise level (t of flow matching) of clean tokens. Where there are any, or some may be drawn, N
    # rows of it follow the N rows of the samples' levels
    clean_level: float | None = None
    # Level rows after these, which generation uses for pictures that a video shows at its frames
    more_levels: int = 0
    starts: tuple[int, ...]  # N + 1 offsets of the samples in T, each a multiple of sample_multiple
    keys: tuple[str, ...]  # of the N samples; empty strings where a sample has none
    captions: tuple[str, ...] = ()  # of the N samples, where they are known; for people alone
    # `LatentSample.level_index` of the N samples; () where one of them has none
    level_indices: tuple[int, ...] = ()
    # Tokens that each sample of a partial pack has, which lacks some of its grid. `starts` count
    # these alone; `grids` and `clean_tokens` still describe the whole pack. None: the pack is whole
    kept_tokens: tuple[int, ...] | None = None
    # Where samples are cut into parts with a level and texts of their own, each part is a sample of
    # this pack: the number of the sample that it was cut from, and its number of target tokens,
    # which come first in it. `clean_tokens` are those of a part, then
    parts_of: tuple[int, ...] | None = None
    kept_targets: tuple[int, ...] | None = None
    # int64, added to the index of each token: sorts each run of neighbours of a token route, those
    # that its layers see before the others. None: all layers see all tokens
    route_T: Tensor | None = None
    # Whether samples 2 i and 2 i + 1 are a pair of a preferred and a rejected latent with the same
    # text, which share all random draws
    in_pairs: bool = False
    pack_id: int  # 63-bit identity that, with seed and step, decides all random draws
    guidance: float | None = None  # guidance scale to embed; None: the network embeds none
    # float32: the level at the end of a sampler's step, for networks of mean flow; None in training
    step_end_N: Tensor | None = None
    # Texts that are made of a given picture: a sample without it has no rows of them
    pictures: tuple[str, ...] = ()
    dropout_seed: int | None = None  # 63 bits, of adapters in training; None drops nothing
    share: SequenceShard = SequenceShard()

    @property
    def num_samples(self) -> int:
        return len(self.grids)

    @property
    def copies(self) -> int:
        """Number of samples that share their random draws."""
        return 2 if self.in_pairs else 1

    @property
    def samples_read(self) -> tuple[int, ...]:
        """For each sample, the index of the first one that came from the same sample of a shard.

        A sample of a shard becomes two if it is a pair, or several if it is divided into parts.
        """
        if self.parts_of is None:
            return tuple(range(0, self.num_samples, self.copies))
        return tuple(self.parts_of.index(n) for n in range(self.parts_of[-1] + 1))

    @property
    def num_levels(self) -> int:
        """M: one level row for each sample, another if tokens may be clean, and `more_levels`."""
        return self.num_samples * (1 if self.clean_level is None else 2) + self.more_levels

    @property
    def text_LE(self) -> Tensor:  # noqa: N802  # names of tensors end in their axes
        """The main text of all samples, end to end."""
        return self.texts[TEXT]

    @property
    def text_starts(self) -> tuple[int, ...]:
        """N + 1 offsets of the samples in `text_LE`."""
        return self.text_offsets[TEXT]

    @property
    def text_rows(self) -> tuple[int, ...]:
        """Number of rows in all text inputs of each sample together."""
        totals = [0] * self.num_samples
        for starts in self.text_offsets.values():
            totals = [n + b - a for n, (a, b) in zip(totals, pairwise(starts), strict=True)]
        return tuple(totals)

    @property
    def latent_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each sample's whole target, even if the pack has a part of them."""
        return tuple(math.prod(grid) for grid in self.grids)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each sample without padding, of target and references together."""
        if self.kept_tokens is not None:
            return self.kept_tokens
        if not self.references:
            return self.latent_tokens
        pairs = zip(self.latent_tokens, self.references, strict=True)
        return tuple(own + sum(map(math.prod, others)) for own, others in pairs)

    @property
    def real_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def loss_tokens(self) -> tuple[int, ...]:
        """Tokens of each sample that have a loss."""
        clean, own = self.clean_tokens or (0,) * self.num_samples, self._targets
        return tuple(tokens - given for tokens, given in zip(own, clean, strict=True))

    @property
    def _targets(self) -> tuple[int, ...]:
        return self.latent_tokens if self.kept_targets is None else self.kept_targets

    @property
    def has_given_tokens(self) -> bool:
        """Whether there are real tokens without noise and loss."""
        return any(self.references) or any(self.clean_tokens)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names of their fields; tensors inside mappings as `field.name`."""
        return dict(_tensors_of(self))

    @property
    def token_tensors(self) -> dict[str, Tensor]:
        """Tensors with a row for each token (names that end in `_T...`), by field."""
        tensors = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {
            name: value
            for name, value in tensors
            if isinstance(value, Tensor) and name.rpartition("_")[2].startswith("T")
        }

    def partial(
        self, rows_T: Tensor, *, starts: tuple[int, ...], kept_tokens: tuple[int, ...]
    ) -> PackedBatch:
        """A pack with only the tokens `rows_T`, with their positions and level rows.

        `starts` and `kept_tokens` count tokens of all context ranks; in each sample real tokens
        come before padding. `share` does not change.
        """
        tensors = {name: tensor[rows_T] for name, tensor in self.token_tensors.items()}
        changes: dict[str, Any] = {**tensors, "route_T": None}
        return replace(self, starts=starts, kept_tokens=kept_tokens, **changes)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> PackedBatch:
        """A copy of the pack in which `tensors` replace those of the same names."""
        changes: dict[str, Any] = {}
        for name, tensor in tensors.items():
            outer, _, inner = name.partition(".")
            if inner:
                changes.setdefault(outer, dict(getattr(self, outer)))[inner] = tensor
            else:
                changes[outer] = tensor
        return replace(self, **changes)

    def with_text(self, name: str, rows_LE: Tensor, starts: tuple[int, ...]) -> PackedBatch:
        """A copy of the pack with `rows_LE` and offsets `starts` for the text input `name`."""
        return replace(
            self,
            texts={**self.texts, name: rows_LE},
            text_offsets={**self.text_offsets, name: starts},
        )

    @property
    def shared_spans(self) -> tuple[tuple[int, int], ...]:
        """(first token, number of real tokens) of each sample, in this context rank's tensors."""
        # Real tokens come first in a sample, and therefore in its pieces as well.
        here = self._tokens_here([(0, real) for real in self.num_tokens])
        sizes = (sum(size for _, size in pieces) for pieces in self._pieces(self.share))
        return tuple(zip(accumulate(sizes, initial=0), here, strict=False))

    @property
    def shared_loss_tokens(self) -> tuple[int, ...]:
        """Number of tokens with a loss of each sample on this context rank."""
        ends = zip(self._targets, self.loss_tokens, strict=True)
        return self._tokens_here([(stop - count, stop) for stop, count in ends])

    def _tokens_here(self, spans: list[tuple[int, int]]) -> tuple[int, ...]:
        """Number of tokens of each sample's span [first, stop) on this context rank."""
        counts = []
        samples = zip(self.starts, self._pieces(self.share), spans, strict=False)
        for start, pieces, (first, stop) in samples:
            overlaps = (
                min(start + stop, at + size) - max(start + first, at) for at, size in pieces
            )
            counts.append(sum(max(overlap, 0) for overlap in overlaps))
        return tuple(counts)

    def _pieces(self, share: SequenceShard) -> list[tuple[tuple[int, int], ...]]:
        """(first token, number of tokens) of each sample's pieces that the rank of `share` has."""
        total = self.starts[-1]
        return [share.pieces(*sample, total=total) for sample in pairwise(self.starts)]

    def rows(self, share: SequenceShard) -> Tensor:
        """Indices in the whole pack of the tokens of `share`, in the order of its tensors."""
        pieces = (piece for sample in self._pieces(share) for piece in sample)
        return torch.cat([torch.arange(first, first + size) for first, size in pieces])


def _tensors_of(pack: PackedBatch) -> Iterator[tuple[str, Tensor]]:
    for one in fields(pack):
        value = getattr(pack, one.name)
        if isinstance(value, Tensor):
            yield one.name, value
        elif isinstance(value, Mapping):
            yield from ((f"{one.name}.{k}", v) for k, v in value.items() if isinstance(v, Tensor))


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A weighted regression: weight · mean over C of an error of scale · (output - target).

    The error is its square, unless `objective.loss` says otherwise. The network gets `input_TC` and
    `level_M` only. Padding tokens are zero in both tensors; clean and reference tokens are the
    latents themselves in `input_TC`, and zero in `target_TC`.
    """

    input_TC: Tensor  # float32, what the network is fed
    level_M: Tensor  # float32, ln(sigma) / 4 for EDM, timestep_scale * t for flow matching
    target_TC: Tensor  # float32, what the raw network output should be
    weight_N: Tensor  # float32, multiplies the error of each token of the sample
    noise_N: Tensor  # float32, sigma or t itself, for metrics and samplers
    # float32, makes a difference of outputs one of velocities; None: they are what is compared
    scale_N: Tensor | None = None
    anchor_TC: Tensor | None = None  # a prediction that the loss holds the network to as well
    # float64, of pairs: mean errors of the network without adapters
    reference_N: Tensor | None = None


def pack_identity(keys: tuple[str, ...]) -> int:
    """Order-sensitive 63-bit hash of the sample keys of a pack, the same on every machine."""
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
