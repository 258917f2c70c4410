"""Rules for small data from measured runs, whose tables are in docs/small_data.md.

Every number of `train.yaml` that is not measured on this machine is decided in this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WANTED_PASSES = 140
"""Passes over the data after which most captions generate the picture that they belong to. Measured
with 1,257 drawings of 16 tokens, captions all different, 7.3 M parameters: after 143 and 163
passes, for 65 to 78% of 100 captions the generated picture is nearer to the caption's own drawing
than to any other of 1,391. With 300 drawings, 4 layers of width 192 and 171 passes: 57 to 86%, and
100% with learned positions."""
FEWEST_PASSES = 60
"""Passes below which a caption hardly ever generates its own picture (9% of captions do after 56
passes, on the drawings of `WANTED_PASSES`)."""
FEWEST_SAMPLES = 32_000
"""Samples seen in training below which the digits 0 to 9 are not learned (86% right after
32,000)."""
TEXT_DROPOUT = 0.1
LAST_LEVEL = 5.0
"""`objective.sigma_min` for coloured pictures with captions of their own. The sampler's last step
goes from this level to the picture that the network expects. Measured with 1,254 drawings, 184
passes, guidance 1: the deviation within areas of one colour, on a scale of 0 to 1, is .032 with a
last level of 2, .023 with 5 and .022 with 10; the right picture is the nearest for 99 or all of 100
captions. For digits, whose captions do not say which picture is wanted, the level stays 0.002."""
LEARNED_GUIDANCE = 1.0
"""`validation.guidance` for pictures with captions of their own that are seen WANTED_PASSES times.
On the drawings of `LAST_LEVEL` the deviation is .023 with guidance 1, .030 with 1.5 and .054 with
2.5 (with a last level of 2). Fewer passes need guidance, which is 2.5 unless it is set."""
MINUTES = 30.0
"""Minutes of training without a GPU, by default."""
PART_TRAINING = 0.9
"""Fraction of the time spent on training; start, validations and checkpoints take the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A network size of the family `dit`: layers, width and heads."""

    name: str
    """A named size, or `custom`."""
    layers: int
    width: int
    heads: int


def _custom(width: int, layers: int, heads: int) -> Size:
    return Size(name="custom", layers=layers, width=width, heads=heads)


# Drawings were learned with widths of 192 and 256; the first and the last are not measured.
SMALL = (
    _custom(128, 4, 4),
    _custom(192, 4, 4),
    _custom(256, 4, 4),
    _custom(256, 6, 4),
    _custom(384, 8, 6),
)
"""Networks for a CPU, ordered by size, the smallest first."""
NAMED = (
    Size(name="dit_s", layers=12, width=384, heads=6),
    Size(name="dit_b", layers=12, width=768, heads=12),
    Size(name="dit_l", layers=24, width=1024, heads=16),
    Size(name="dit_xl", layers=28, width=1152, heads=16),
)
"""Networks for a GPU (arXiv:2212.09748, Table 1)."""
NAMED_FROM = (0, 20_000, 200_000, 1_000_000)
"""Number of training samples from which each size of `NAMED` is chosen if no time is given; not
measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """Learning rate and other training settings for a list of network sizes."""

    precision: str
    lr: float
    beta2: float
    warm_up: int
    sigma_rel: float
    samples: int
    """Samples per step, if the corpus and `tokens` allow as many. Drawings were learned with 64 and
    with 128: the number of passes over each sample decides."""
    tokens: int
    """Largest capacity of a pack in tokens, unless a sample is longer."""
    fewest_tokens: int
    """Least mean number of tokens in a sample; the patch size is the largest that leaves so
    many."""
    adaln_rank: int


ON_CPU = Optimization(
    precision="fp32",
    lr=2e-3,  # small models take large steps
    beta2=0.99,
    warm_up=20,
    sigma_rel=0.08,
    samples=64,
    tokens=4096,
    fewest_tokens=16,
    adaln_rank=64,
)
ON_GPU = Optimization(
    precision="bf16",
    lr=1e-4,  # as DiT (arXiv:2212.09748, Sec. 4)
    beta2=0.95,
    warm_up=200,
    sigma_rel=0.1,
    samples=512,
    tokens=15360,
    fewest_tokens=64,
    adaln_rank=256,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLevels:
    """Mean and standard deviation of ln sigma in EDM training, with the reason."""

    mean: float
    std: float
    why: str


def noise_levels(
    *, colours: int | None, basis: str, side: float, own_captions: bool
) -> NoiseLevels:
    """Noise levels for pictures of `side` pixels.

    `colours` is 1 (grey) or 3 for the codec without weights, and `basis` what its cells hold;
    `colours` is None for latents of a VAE. The mean of ln sigma grows by ln 2 where the side
    doubles (arXiv:2301.11093, Sec. 3.1), from the sizes that were measured: digits of 8 pixels,
    drawings of 32.
    """
    if colours is None:
        return NoiseLevels(mean=0.0, std=1.0, why="latents of a VAE; not measured here")
    if colours == 1:
        mean = round(-0.4 + math.log(side / 8), 1)
        return NoiseLevels(mean=mean, std=1.2, why="-0.4 for digits of 8 pixels, ln 2 more doubled")
    # Levels below LAST_LEVEL are of no use where the sampler ends there.
    at_32, std = (1.0, 1.2) if own_captions else ({"dct": 0.3}.get(basis, 0.4), 1.4)
    mean = round(at_32 + max(0.0, math.log(side / 32)), 1)
    return NoiseLevels(
        mean=mean, std=std, why=f"{at_32} for drawings of 32 pixels, ln 2 more doubled"
    )
