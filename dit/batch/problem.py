"""`Problem`: the regression that an objective sets for the network."""

# C patch features, T packed tokens, N samples, M rows of the table of noise levels

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A regression of the network's output on targets, with a weight for each sample.

    The loss of a token is weight * mean over its C numbers of error(scale * (output - target)). The
    fields describe the main stream; `others` has the problem of each other token stream. The error
    is the square, unless `objective.loss` is set. The network sees only `input_TC` and `level_M`.
    Padding tokens are zero in `input_TC` and `target_TC`; clean and reference tokens are the
    latents themselves in `input_TC`, and zero in `target_TC`.
    """

    input_TC: Tensor  # float32, what the network is fed
    level_M: Tensor  # float32, ln(sigma) / 4 for EDM, timestep_scale * t for flow matching
    target_TC: Tensor  # float32, what the raw network output should be
    weight_N: Tensor  # float32, multiplies the error of each token of the sample
    noise_N: Tensor  # float32, sigma or t itself, for metrics and samplers
    # float32, turns a difference of outputs into one of velocities; None: outputs are compared
    scale_N: Tensor | None = None
    # A prediction; the loss adds the weighted squared distance from it (`drift_weight`)
    anchor_TC: Tensor | None = None
    # float64, of pairs: mean errors of the network without adapters
    reference_N: Tensor | None = None
    # bool, if a student is trained: whether it predicts a latent that it generates; for metrics
    made_N: Tensor | None = None
    # Problems of the other streams of the pack, by name, each with levels and noise of its own
    others: Mapping[str, Problem] = field(default_factory=dict)
