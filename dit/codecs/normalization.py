"""Whitens latents: to zero mean and unit variance per channel, and back."""

# C latent channels, F frames, H rows, W columns, N = F * H * W cells

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A constant channel has no spread to divide by. Half precision reaches 65504, so 2 / 1e-3 fits.
STD_MIN = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitening:
    """Mean and standard deviation of each latent channel, or of each frame of each channel.

    For values by frame, `mean` and `std` list the frames of the first channel, then of the next.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def identity(cls, channels: int) -> Whitening:
        return cls(mean=(0.0,) * channels, std=(1.0,) * channels)

    def apply(self, latent_CFHW: Tensor) -> Tensor:
        """The whitened latent, (latent - mean) / std, in float32."""
        return (latent_CFHW.float() - _like(self.mean, latent_CFHW)) / _like(self.std, latent_CFHW)

    def apply_to_logvar(self, logvar_CFHW: Tensor) -> Tensor:
        """The log variance of a whitened latent, from that of the latent; float32."""
        return logvar_CFHW.float() - 2 * _like(self.std, logvar_CFHW).log()

    def undo(self, latent_CFHW: Tensor) -> Tensor:
        """The latent before whitening, latent * std + mean, float32, on the latent's device."""
        std, mean = _like(self.std, latent_CFHW), _like(self.mean, latent_CFHW)
        return latent_CFHW.float() * std + mean


def _like(values: tuple[float, ...], latent_CFHW: Tensor) -> Tensor:
    """`values`, one for each channel or for each frame of each channel, as a tensor [C, F, 1, 1].

    If the latent has more frames than there are values, the values of the last frame are repeated.
    """
    channels, frames = latent_CFHW.shape[:2]
    column = torch.tensor(values, dtype=torch.float32, device=latent_CFHW.device)
    column = column.view(channels, -1, 1, 1)
    return column[:, torch.arange(frames).clamp(max=column.shape[1] - 1)]


class Moments:
    """Mean and variance per channel of a stream of latents, in float64.

    Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983), Eq. 2.1: merging
    centred sums loses no digits, where a sum of squares would.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean_C = np.zeros(())
        self._centred_C = np.zeros(())  # sum of squared distances from the mean

    def add(self, latent_CFHW: Tensor) -> None:
        # NumPy adds in one thread, so the digits do not depend on the number of cores.
        values_CN = latent_CFHW.double().flatten(1).numpy()
        other = Moments()
        other.count, other._mean_C = values_CN.shape[1], values_CN.mean(1)
        other._centred_C = np.square(values_CN - other._mean_C[:, None]).sum(1)
        self.merge(other)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self._centred_C).all())

    def merge(self, other: Moments) -> None:
        """Adds the latents that `other` has seen, in place.

        The order of merging changes the last digits.
        """
        total, shift_C = self.count + other.count, other._mean_C - self._mean_C
        weight = self.count * other.count / total
        self._centred_C = self._centred_C + other._centred_C + shift_C**2 * weight
        self._mean_C = self._mean_C + shift_C * (other.count / total)
        self.count = total

    def whitening(self) -> Whitening:
        """The whitening by the mean and standard deviation of all latents, rounded to float32.

        Standard deviations below `STD_MIN` are raised to it.
        """
        std_C = np.sqrt(self._centred_C / self.count).clip(STD_MIN)
        return Whitening(mean=_rounded(self._mean_C), std=_rounded(std_C))


def _rounded(values_C: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values_C.astype(np.float32))
