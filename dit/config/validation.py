"""Validation: its datasets, and the samples that a run generates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dit.config.checks import Rule, at_least_one, check, numbers, positive, within
from dit.config.choices import Sampler, ValidationLatents
from dit.config.resume import AtStart, Live
from dit.local_path import DataPath, LocalPath

MOST_GUIDANCE = 1000
"""Largest guidance scale; the lowest is its negative."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A held-out dataset."""

    name: Live[str]
    """Name of the dataset in the names of its metrics: val_NAME_loss."""
    path: Live[DataPath]
    """Folder with shards and `.nv-meta`, whose `val` split is read."""

    def __post_init__(self) -> None:
        check(
            (
                re.fullmatch(r"[A-Za-z0-9-]+", self.name) is not None,
                f"name={self.name!r} must be letters, digits and hyphens",
            )
        )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation every `train.eval_interval` steps: loss on `train.eval_iters` packs; samples."""

    quantiles: Live[int] = 5
    """Noise levels at which each pack is evaluated: midpoints of equal quantile ranges."""
    fixed_levels: Live[bool] = False
    """Evaluate each sample once, at one fixed noise level k / 8 of flow matching. k is the
    `timestep` of its shard, or else its position in the set modulo 8."""
    text_dropout: Live[float] = 0.0
    """Fraction of the samples evaluated without caption: the same samples at every validation."""
    target: Live[float | None] = None
    """Validation loss at or below which the run ends, with a checkpoint; the EMA's loss, if there
    is an EMA."""
    sets: Live[tuple[ValidationSet, ...]] = ()
    """Additional held-out datasets to evaluate."""
    latents: Live[ValidationLatents] = ValidationLatents.MEAN
    """Latents of shards that store distributions (`data_prep --latent_distribution`): their mean,
    or drawn once for each rng.seed and sample, so that all validations see the same. Training draws
    anew at each visit."""
    at_start: AtStart[bool] = False
    """Validate before the first step, too."""
    prompts_file: Live[LocalPath | None] = None
    """Prompts to generate each time: one per line, or JSON `{"data": [{"caption": ...}]}`."""
    num_captions: Live[int] = 0
    """Number of held-out captions to generate samples for; every caption is used once before any is
    used twice."""
    sampler: Live[Sampler | None] = None
    """Solver of the sampling ODE: euler, heun, dpm++ or unipc; or lcm. null: heun, or the sampler
    of a student (distill.method): euler, or lcm."""
    sampling_steps: Live[int | None] = None
    """Steps of the sampler. null: 35, or the steps of a student (distill.steps)."""
    guidance: Live[float | None] = None
    """Guidance scale g in uncond + g (cond - uncond), also for generation and playground; 1:
    without guidance, at half the cost; null: 2.5, or 1 if the network has a guidance embedding or
    is a student (distill.method)."""
    reference_guidance: Live[float] = 1.0
    """Scale i in none + i (references - none) + g (both - references) for a sample with references,
    also for generation (OmniGen2). At most 1: none + g (both - none), with one network call
    less."""
    negative_prompt: Live[str] = ""
    """Negative prompt for guidance, for prompts in `prompts_file` without one of their own."""
    height: Live[int | None] = None
    """Height of a prompt's picture in pixels; null: the most frequent size of the dataset."""
    width: Live[int | None] = None
    """Width of a prompt's picture in pixels; null: the most frequent size of the dataset."""
    num_video_frames: Live[int | None] = None
    """Number of pixel frames of a prompt's video; 1 is a picture, null: as in the dataset."""
    fps: Live[float] = 24.0
    """Frames per second of a prompt's video."""
    sample_seed: Live[int] = 0
    """The seed of the first sample's noise; the i-th one uses sample_seed + i at every
    validation."""
    feature_extractor: Live[LocalPath | None] = None
    """TorchScript file or Transformers folder of a feature network, to compute FID, KID and CLIP
    score of the samples for held-out captions."""
    t5_cache_dir: Live[LocalPath | None] = None
    """Hugging Face cache with the text encoder of the prompts; null is the default cache."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.sets]
        check(
            *at_least_one(self, "quantiles", "height", "width", "num_video_frames"),
            *positive(self, "target"),
            within(self, "text_dropout", 0, 1),
            (len(set(names)) == len(names), f"sets={names} has a name twice; choose other names"),
            *self._sampling(),
            *numbers(
                self,
                quantiles=1000,
                target=2**30,
                height=2**16,
                width=2**16,
                num_video_frames=2**16,
                sample_seed=2**63 - 1,
            ),
        )

    def _sampling(self) -> list[Rule]:
        steps = self.sampling_steps
        scales = {"guidance": self.guidance, "reference_guidance": self.reference_guidance}
        given = {name: scale for name, scale in scales.items() if scale is not None}
        return [
            (
                steps is None or 1 <= steps <= 1000,
                f"sampling_steps={steps} must lie in [1, 1000]; 35 is usual",
            ),
            *(
                (
                    math.isfinite(scale),
                    f"{name}={scale} must be a finite number; 1 is without guidance",
                )
                for name, scale in given.items()
            ),
            *(within(self, name, -MOST_GUIDANCE, MOST_GUIDANCE) for name in given),
            (
                0 <= self.num_captions <= 1024,
                f"num_captions={self.num_captions} must lie in [0, 1024]; 8 make a readable grid",
            ),
            (
                self.feature_extractor is None or self.num_captions >= 2,
                f"feature_extractor={self.feature_extractor} compares samples with held-out ones,"
                f" and num_captions={self.num_captions} asks for too few; set it to at least 2,"
                " better 500",
            ),
            (
                0 < self.fps < math.inf,
                f"fps={self.fps} must be positive and finite; 24 is usual",
            ),
            within(self, "fps", 1e-3, 1e6),
            (
                self.sample_seed >= 0,
                f"sample_seed={self.sample_seed} must not be negative; take any integer from 0",
            ),
        ]

    def is_reached_by(self, loss: float) -> bool:
        """Whether `loss` is at or below `target`, if that is set."""
        return self.target is not None and loss <= self.target

    @property
    def samples(self) -> bool:
        """Whether validation generates samples."""
        return self.prompts_file is not None or self.num_captions > 0
