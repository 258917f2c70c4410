"""Generates in one stage, or in two with a latent upsampler between them.

1. generate   frames and sound, the frames smaller by the factor of the upsampler
2. enlarge    the latents of the frames
3. generate   again, from both latents with noise of the second stage's first level
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dit.codecs.vae.latent_upsampler import LatentUpsampler
from dit.config import DistillConfig, RunConfig, SamplingLevels
from dit.models.registry import has_sound
from dit.progress import Track, no_progress
from dit.sampling.commands.options import SamplerOptions
from dit.sampling.conditions.sound import other_seed
from dit.sampling.generate import Generated, Request, SamplingSettings, Watch, generate_streams
from dit.sampling.latent_sizes import LatentStride, Size
from dit.sampling.open_checkpoint import OpenCheckpoint

SECOND_STAGE = (0.909375, 0.725, 0.421875)
"""STAGE_2_DISTILLED_SIGMA_VALUES of Diffusers' LTX-2."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The noise levels of one stage or of two, and what is between the two."""

    cell: LatentStride
    """The sizes of latent cells of the network."""
    sigmas: tuple[float, ...]
    upsampler: LatentUpsampler | None
    upsampled_sigmas: tuple[float, ...]

    @classmethod
    def of(cls, options: SamplerOptions, opened: OpenCheckpoint) -> Stages:
        """The stages for which `options` ask.

        Raises:
            ValueError: the upsampler cannot be opened, or is not for the latents of the run.
        """
        upsampler = None
        if options.upsampler is not None:
            if not has_sound(opened.config.model):
                raise ValueError(
                    f"--upsampler {options.upsampler}: model.family={opened.config.model.family}"
                    " generates in one stage, and ltx2 in two; leave it out"
                )
            upsampler = LatentUpsampler.of(options.upsampler, opened.decoder)
        return cls(
            cell=opened.latent_stride,
            sigmas=options.sigmas,
            upsampler=upsampler,
            upsampled_sigmas=options.upsampled_sigmas or SECOND_STAGE,
        )

    @property
    def stride(self) -> LatentStride:
        """The sizes of latent cells, whose rows and columns are those that the upsampler makes."""
        times = 1 if self.upsampler is None else self.upsampler.scale.numerator
        return replace(self.cell, side_cells=self.cell.side_cells * times)

    def generate(
        self,
        model: nn.Module,
        sizes: Mapping[int, Size],
        request: Callable[[int, Size], Request],
        *,
        config: RunConfig,
        settings: SamplingSettings,
        track: Track = no_progress,
        watch: Watch | None = None,
    ) -> list[Generated]:
        """Latents and sounds of the samples whose sizes in pixels `sizes` has, in its order.

        `request` makes what is asked of a sample at a size; the other arguments and the errors are
        those of `generate_streams`.
        """

        def run(requests: Sequence[Request], sigmas: tuple[float, ...]) -> list[Generated]:
            steps = len(sigmas) or settings.num_steps
            return generate_streams(
                model,
                requests,
                config=with_sigmas(config, sigmas),
                settings=replace(settings, num_steps=steps),
                track=track,
                watch=watch,
            )

        upsampler = self.upsampler
        if upsampler is None:
            return run([request(i, size) for i, size in sizes.items()], self.sigmas)
        assert upsampler.model is not None  # which fails before the first stage, if it does
        small, large = list[Request](), list[Request]()
        for i, size in sizes.items():
            latent = self.stride.latent(size)
            small.append(request(i, self.cell.pixels(upsampler.smaller(latent))))
            large.append(request(i, self.cell.pixels(latent)))
        starts = [
            Generated(upsampler.enlarged(one.latent_CFHW), one.sound_KA)
            for one in run(small, self.sigmas)
        ]
        pairs = zip(large, starts, strict=True)
        again = [replace(r, start=s, seed=other_seed(r.seed, 2)) for r, s in pairs]
        return run(again, self.upsampled_sigmas)


def with_sigmas(config: RunConfig, sigmas: Sequence[float]) -> RunConfig:
    """`config`, whose samplers step from each of the noise levels `sigmas`; as it is for none."""
    if not sigmas:
        return config
    listed = tuple(level * config.objective.timestep_scale for level in sigmas)
    changes: dict[str, Any] = {"sampling_levels": SamplingLevels.LINEAR, "shift_terminal": None}
    changes |= {"sampling_timesteps": listed, "level_spacing": None}
    # A student's rules are those of its training.
    own = replace(config.objective, **changes)
    return replace(config, objective=own, distill=DistillConfig())
