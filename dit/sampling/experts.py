"""Combines two networks that generate one sample.

TwoExperts   one for high noise levels, one for low noise levels (Wan 2.2)
GuidedPair   one with captions, and a weaker one from which guidance moves away
"""

# T packed tokens, C patch features, N samples, M level rows

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dit.config import ModelConfig, Problems, RunConfig
from dit.models.registry import family_of
from dit.objectives.registry import sampling_path

if TYPE_CHECKING:
    from dit.batch import PackedBatch
    from dit.distributed.model_parallel import FullForward

_LEVELS = (
    *("flow_shift", "shift_base_tokens", "time_shift_type", "base_shift", "max_shift"),
    *("base_image_seq_len", "max_image_seq_len", "timestep_scale", "sampling_levels"),
    *("shift_terminal", "level_spacing", "sampling_timesteps", "prediction"),
)


class TwoNetworks(nn.Module):
    """Two networks as one module; with `offload` the one that is not in use is in host memory."""

    def __init__(self, first: FullForward, second: FullForward, *, offload: bool) -> None:
        super().__init__()
        self.first, self.second, self.offload = first, second, offload
        self.groups = first.groups
        self.device = next(first.parameters()).device

    def _called(self, network: FullForward) -> FullForward:
        if self.offload:
            other = self.second if network is self.first else self.first
            other.to("cpu")
            network.to(self.device)
        return network


class GuidedPair(TwoNetworks):
    """A network, and a weaker one without captions from whose predictions guidance moves away."""

    @torch.no_grad()
    def forward(self, input_TC: Tensor, level_M: Tensor, batch: PackedBatch) -> Tensor:
        return self._called(self.first)(input_TC, level_M, batch)

    @torch.no_grad()
    def away(self, input_TC: Tensor, level_M: Tensor, batch: PackedBatch) -> Tensor:
        """Output [T, C] of the weaker network, from which guidance moves away."""
        return self._called(self.second)(input_TC, level_M, batch)


class TwoExperts(TwoNetworks):
    """Two experts as one network: each sample is computed by the expert for its noise level."""

    def __init__(
        self, high: FullForward, low: FullForward, *, boundary: float, offload: bool
    ) -> None:
        """`boundary` is the lowest timestep of the expert `high`."""
        super().__init__(high, low, offload=offload)
        self.boundary = boundary

    @torch.no_grad()
    def forward(self, input_TC: Tensor, level_M: Tensor, batch: PackedBatch) -> Tensor:
        is_high_N = level_M[: batch.num_samples] >= self.boundary
        if bool(is_high_N.all()):
            return self._called(self.first)(input_TC, level_M, batch)
        low_TC = self._called(self.second)(input_TC, level_M, batch)
        if not bool(is_high_N.any()):
            return low_TC
        # If levels are shifted by the number of tokens, samples of a pack pass the boundary at
        # different steps.
        high_TC = self._called(self.first)(input_TC, level_M, batch)
        return torch.where(is_high_N[batch.segment_T, None], high_TC, low_TC)


def boundary_of(high: RunConfig, low: RunConfig) -> float:
    """The timestep at which the ranges of noise levels of two experts meet.

    Raises:
        Problems: the ranges do not meet or leave out levels, or the runs do not fit together.
    """
    ranges = [list(run.objective.level_range or (0.0, 1.0)) for run in (high, low)]
    (first, top), (bottom, last) = ranges
    problems = []
    if not (first == last and top == 1 and bottom <= 1e-3):
        problems.append(
            f"objective.level_range={ranges[0]} of --checkpoint_path and {ranges[1]} of"
            " --checkpoint_path_low do not meet: give the expert of the high levels, such as"
            " [0.875, 1], as the first, and the expert of all levels below, such as [0, 0.875], as"
            " the second"
        )
    for key in _LEVELS:
        one, other = (getattr(run.objective, key) for run in (high, low))
        if one != other:
            problems.append(
                f"objective.{key}={one} of --checkpoint_path and {other} of --checkpoint_path_low"
                " must be equal; give two experts that were trained with the same value"
            )
    problems += _other_inputs(high, low, "--checkpoint_path_low")
    if problems:
        raise Problems(problems)
    level = torch.tensor(first, dtype=torch.float64)
    return float(sampling_path(high.objective).network_level(level))


def check_pair(config: RunConfig, away: RunConfig) -> None:
    """Checks that the network of the run `away` can be the weaker one of a `GuidedPair`.

    Raises:
        Problems: that network reads other latents or inputs than the network of `config`.
    """
    if problems := _other_inputs(config, away, "--checkpoint_path_away"):
        raise Problems(problems)


def _other_inputs(one: RunConfig, other: RunConfig, option: str) -> list[str]:
    if _reads(one.model) == _reads(other.model):
        return []
    return [
        f"the networks of --checkpoint_path and {option} read different latents or inputs; give two"
        " checkpoints of one model"
    ]


def _reads(model: ModelConfig) -> tuple[object, ...]:
    return (
        family_of(model).inputs(model),
        model.in_channels,
        model.patch_spatial,
        model.patch_temporal,
    )
