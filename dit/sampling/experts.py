"""Two networks of one sample: the expert of high noise levels, and that of low ones (Wan 2.2)."""

# T packed tokens, C patch features, N samples, M level rows

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dit.config import Problems, RunConfig
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


class TwoExperts(nn.Module):
    """One network to a sampler: each sample goes to the expert of its level."""

    def __init__(
        self, high: FullForward, low: FullForward, *, boundary: float, offload: bool
    ) -> None:
        """`boundary` is the lowest level of the high expert, as networks are told it.

        With `offload` the expert that was not called last is in host memory.
        """
        super().__init__()
        self.high, self.low, self.boundary, self.offload = high, low, boundary, offload
        self.groups = high.groups
        self.device = next(high.parameters()).device

    @torch.no_grad()
    def forward(self, input_TC: Tensor, level_M: Tensor, batch: PackedBatch) -> Tensor:
        is_high_N = level_M[: batch.num_samples] >= self.boundary
        if bool(is_high_N.all()):
            return self._called(self.high)(input_TC, level_M, batch)
        low_TC = self._called(self.low)(input_TC, level_M, batch)
        if not bool(is_high_N.any()):
            return low_TC
        # Shifts by the number of tokens: samples of a pack pass the boundary at different steps.
        high_TC = self._called(self.high)(input_TC, level_M, batch)
        return torch.where(is_high_N[batch.segment_T, None], high_TC, low_TC)

    def _called(self, expert: FullForward) -> FullForward:
        if self.offload:
            other = self.low if expert is self.high else self.high
            other.to("cpu")
            expert.to(self.device)
        return expert


def boundary_of(high: RunConfig, low: RunConfig) -> float:
    """The level where the ranges of two experts meet, as networks are told it.

    Raises:
        Problems: the ranges do not meet or leave out levels, or the runs do not fit together.
    """
    ranges = [list(run.objective.level_range or (0.0, 1.0)) for run in (high, low)]
    (first, top), (bottom, last) = ranges
    problems = []
    if not (first == last and top == 1 and bottom <= 1e-3):
        problems.append(
            f"objective.level_range={ranges[0]} of --checkpoint_path and {ranges[1]} of"
            " --checkpoint_path_low do not meet: the first must be the expert of the high levels,"
            " such as [0.875, 1], and the second that of all below, such as [0, 0.875]"
        )
    for key in _LEVELS:
        one, other = (getattr(run.objective, key) for run in (high, low))
        if one != other:
            problems.append(
                f"objective.{key}={one} of --checkpoint_path and {other} of --checkpoint_path_low:"
                " both experts sample at the same levels"
            )
    if _reads(high) != _reads(low):
        problems.append(
            "the networks of --checkpoint_path and --checkpoint_path_low read other latents or"
            " inputs, so that they are no two experts of one model"
        )
    if problems:
        raise Problems(problems)
    level = torch.tensor(first, dtype=torch.float64)
    return float(sampling_path(high.objective).network_level(level))


def _reads(config: RunConfig) -> tuple[object, ...]:
    m = config.model
    return family_of(m).inputs(m), m.in_channels, m.patch_spatial, m.patch_temporal
