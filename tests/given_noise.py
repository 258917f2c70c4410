"""Generation from a noise that a test gives, in the place of the drawn one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from dit.config import RunConfig
from dit.data.pack import PatchLayout, pack_samples
from dit.sampling import generate
from dit.sampling.generate import Request


def from_noise(config: RunConfig, noise_CFHW: Tensor) -> AbstractContextManager[object]:
    """In the place of `initial_noise`: `noise_CFHW` of each sample, nothing for references."""
    size = tuple(noise_CFHW.shape[1:])

    def drawn(batch, seeds):
        del seeds  # all samples begin alike, whatever their order in the pack
        blank = Request(inputs={}, negative={}, latent_FHW=size, fps=float("nan"), seed=0)
        sample = replace(generate._blank(0, blank, config, {}), latent_CFHW=noise_CFHW)
        own_TC = pack_samples([sample], PatchLayout.of(config)).latent_TC
        found_TC = torch.zeros_like(batch.latent_TC)
        tokens = size[0] // config.model.patch_temporal
        tokens *= size[1] * size[2] // config.model.patch_spatial**2
        for start in batch.starts[:-1]:
            found_TC[start : start + tokens] = own_TC[:tokens]
        return found_TC

    return patch.object(generate, "initial_noise", drawn)
