"""Types of the values that a training method, or a kind of input, adds to a stream of a pack.

A stream without the method has no value of the type. Tensors whose names end in `_T...` have a row
for each token of the stream, and are split with its tokens.
"""

# T packed tokens, C patch features, N samples, M rows of the table of noise levels
# L text tokens, E text width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dit.batch.sample import Grid


def by_type(*values: object) -> Mapping[type, Any]:
    """Maps the type of each of `values` to the value, as in `PackedBatch.methods`; skips None."""
    return {type(value): value for value in values if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentVariance:
    """Log variances of a pack whose latents are means; each step draws new latents from them."""

    logvar_TC: Tensor  # log variance of each number of the latent, float32, -inf for none


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """Loss weight of each token; without it, all tokens of a pack have weight 1."""

    # float32, at least 0: multiplies the loss of each target token; other tokens do not use it.
    # The loss is still divided by the number of target tokens
    weight_T: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyTokens:
    """Noisy tokens and noise levels of a token stream other than the latents, for the network."""

    input_TC: Tensor  # float32
    level_M: Tensor  # float32, by rows of the table of noise levels of the stream


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanTokens:
    """Tokens without noise and loss, of frames that condition a sample or of references.

    They have a noise level of their own.
    """

    level: float  # their noise level (t of flow matching)
    counts: tuple[int, ...]  # clean tokens at the beginning of each target, or of each part


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceGrids:
    """Grids of reference latents, whose tokens follow those of a sample's target."""

    of: tuple[tuple[Grid, ...], ...]  # grids of each sample's references; () for none


@dataclass(frozen=True, kw_only=True, slots=True)
class NullTexts:
    """Null texts stored with each sample, which replace its text if its caption is dropped."""

    rows_LE: Tensor  # bfloat16 or float32, of the N samples laid end to end; not tokens of the pack
    starts: tuple[int, ...]  # N + 1 offsets of the samples in L; some have no rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTexts:
    """Names of text inputs that are computed from a picture which conditions the sample.

    A sample without such a picture has no rows in them.
    """

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceInput:
    """The guidance scale as an input of networks with a guidance embedding."""

    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Marks preference pairs: sample 2 i is preferred to sample 2 i + 1, with the same text.

    The two samples of a pair share all random draws.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokens:
    """Numbers of tokens in a partial pack, which lacks some tokens of each grid.

    `PackedBatch.starts` counts only the remaining tokens, while `grids` and `clean_tokens` still
    describe the whole pack.
    """

    counts: tuple[int, ...]  # real tokens of each sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Marks samples that are parts of one stored sample, each with its own noise level and text."""

    of: tuple[int, ...]  # number of the sample that each part was cut from
    targets: tuple[int, ...]  # target tokens of each part, which come first in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Order of tokens for layers that process only some of them (token routing).

    In each run of neighbouring tokens, those that the layers process come first.
    """

    # int64, added to the index of each token: sorts each run, tokens that the layers see first
    move_T: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDropout:
    """Random seed for the dropout of adapters' inputs, in training."""

    seed: int  # 63 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLevels:
    """The fixed noise levels of validation, one for each sample of the pack."""

    indices: tuple[int, ...]  # the k of the level k / 8 of each of the N samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionLevels:
    """Further noise levels, for pictures that generation fixes at frames of a video."""

    rows: int  # number of their rows in the table of noise levels, after samples and clean tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """Attention that a pass leaves out, for a prediction from which guidance moves away."""

    value_layers: tuple[int, ...] = ()
    """Indices of the layers whose self-attention returns its values, as if each token attended to
    itself alone."""
    isolated: bool = False
    """Whether streams do not attend to each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """Noise level at the end of a sampler's step, for each sample; for mean-flow networks."""

    level_N: Tensor  # float32
