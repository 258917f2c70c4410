"""What one method, or one kind of input, adds to a pack: one value, by its type.

A pack that does not use the method has no value of the type. Tensors whose names end in `_T...`
have a row for each token of the pack, and are split with its tokens.
"""

# T packed tokens, C patch features, N samples, M level rows, L text tokens, E text width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dit.batch.sample import Grid


def by_type(*values: object) -> Mapping[type, Any]:
    """The values of methods by their types, as `PackedBatch.methods` has them, without None."""
    return {type(value): value for value in values if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentVariance:
    """Variances of latents: those of the pack are means, of which a step draws its latents."""

    logvar_TC: Tensor  # log variance of each number of the latent, float, -inf for none


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """Weights of the loss; a pack without them has 1 for all tokens."""

    # float32, at least 0: multiplies the loss of each target token, and means nothing elsewhere.
    # What a loss is divided by stays the number of target tokens
    weight_T: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyTokens:
    """What a network is fed of a stream beside the main one."""

    input_TC: Tensor  # float32
    level_M: Tensor  # float32, of the level rows of the stream


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanTokens:
    """Tokens without noise and loss: given frames, or references with a level of their own."""

    level: float  # their noise level (t of flow matching)
    counts: tuple[int, ...]  # of each target, at its beginning; those of a part in a pack of parts


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceGrids:
    """Reference latents, whose tokens follow those of a sample's target."""

    of: tuple[tuple[Grid, ...], ...]  # grids of each sample's references; () for none


@dataclass(frozen=True, kw_only=True, slots=True)
class NullTexts:
    """Rows in the place of the main text of a dropped caption, which the samples bring along."""

    rows_LE: Tensor  # bfloat16 or float32, of the N samples laid end to end; they are no tokens
    starts: tuple[int, ...]  # N + 1 offsets of the samples in L; some have no rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTexts:
    """Texts that are made of a given picture: a sample without it has no rows of them."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceInput:
    """The guidance scale, as an input of networks that embed it."""

    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Samples 2 i and 2 i + 1 are a preferred and a rejected latent with the same text.

    The two share all random draws.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokens:
    """Tokens of a partial pack, which lacks some of each grid.

    `PackedBatch.starts` count these alone, while `grids` and `clean_tokens` still describe the
    whole pack.
    """

    counts: tuple[int, ...]  # real tokens of each sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Samples that are parts of the samples that were read, with a level and texts of their own."""

    of: tuple[int, ...]  # number of the sample that each part was cut from
    targets: tuple[int, ...]  # target tokens of each part, which come first in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The draw of a token route: its layers see some of the tokens of each run of neighbours."""

    # int64, added to the index of each token: sorts each run, tokens that the layers see first
    move_T: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDropout:
    """Dropout of the inputs of adapters, in training."""

    seed: int  # 63 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLevels:
    """Noise levels of validation, one for each sample."""

    indices: tuple[int, ...]  # the k of the level k / 8 of each of the N samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionLevels:
    """Level rows of generation, of pictures that a video shows at its frames."""

    rows: int  # they follow the rows of the samples and of clean tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """Ends of the steps of a sampler, for networks of mean flow."""

    level_N: Tensor  # float32
