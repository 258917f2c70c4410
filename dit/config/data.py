"""Sources of samples, real or synthetic, and how samples are packed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dit.config.checks import at_least_one, check, not_negative, numbers, positive, within
from dit.config.resume import Live, OfData
from dit.local_path import DataPath


@dataclass(frozen=True, kw_only=True)
class MockGeometry:
    """Size of synthetic samples in latent cells, and their frequency."""

    frames: OfData[int] = 1
    """Frames of the latent; 1 for an image."""
    height: OfData[int] = 64
    """Rows of the latent."""
    width: OfData[int] = 64
    """Columns of the latent."""
    text_length: OfData[int] = 512
    """Number of text tokens."""
    fps: OfData[float | None] = None
    """Frames per second; null for an image."""
    weight: OfData[float] = 1.0
    """Relative frequency in the mixture."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "frames", "height", "width", "text_length"),
            *positive(self, "weight"),
            (self.fps is None or self.fps > 0, f"fps={self.fps} must be positive or null"),
            within(self, "fps", 1e-3, 1e6),
            *numbers(self, frames=2**16, height=2**16, width=2**16, text_length=2**20, weight=1e12),
        )


@dataclass(frozen=True, kw_only=True)
class BlendEntry:
    """One dataset of a blend."""

    path: OfData[DataPath]
    """Folder with shards and `.nv-meta`."""
    weight: OfData[float] = 1.0
    """Relative probability that the next sample comes from this dataset."""

    def __post_init__(self) -> None:
        check(*positive(self, "weight"), *numbers(self, weight=1e12))


class Balance(StrEnum):
    """How data-parallel ranks get packs of about equal cost in each step."""

    NONE = "none"
    FLOPS = "flops"
    """Packs are formed as with `none`; all ranks then take them in the order of their cost."""
    FLOPS_TARGET = "flops_target"
    """Packs are formed so that most cost the same, and then taken in the order of their cost."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Sources of samples, and how samples share a pack."""

    path: OfData[DataPath | None] = None
    """Folder with shards and `.nv-meta`, local or at msc://PROFILE/PATH; or an Energon metadataset
    YAML. A copy elsewhere counts as the same dataset."""
    blend: OfData[tuple[BlendEntry, ...]] = ()
    """Several datasets with weights, instead of `path`."""
    mock: OfData[bool] = False
    """Synthetic samples from a seed instead of files (`--mock`)."""
    mock_samples: OfData[tuple[MockGeometry, ...]] = (MockGeometry(),)
    """Sizes of mock samples, each with its relative frequency."""
    task_encoder_seq_length: OfData[int] = 15360
    """Tokens in one pack, all samples together."""
    packing_buffer_size: OfData[int] = 100
    """Samples among which a round of packing chooses; 64 are enough. If these are too short to fill
    a pack, a round takes as many samples as fill one."""
    balance: OfData[Balance] = Balance.NONE
    """How data-parallel ranks get about equal cost per step. `flops_target` forms packs of similar
    cost if samples allow it; `flops` only groups packs of similar cost into steps."""
    balance_packs: OfData[int] = 64
    """Packs among which each loader process chooses, if `balance` is not none. With more packs the
    ranks' costs differ less."""
    sample_multiple: OfData[int] = 16
    """Each sample is padded to a multiple of this many tokens, whatever the layout."""
    num_workers: Live[int] = 2
    """Loader processes per data-parallel rank; 0 reads in the training process."""
    use_train_split_for_val: Live[bool] = False
    """Validate on the training split, with a separate loader, even if there is a `val` split."""
    shuffle_buffer_size: OfData[int] = 100
    """Samples in the shuffle buffer, before packing."""
    max_samples_per_sequence: OfData[int] = 100
    """Consecutive samples read from one shard before another shard is chosen."""
    max_bad_fraction: Live[float] = 0.01
    """Fraction of the samples that may be refused, for any reason, before the run stops."""
    checkpoint_every_sec: Live[float] = 10.0
    """Seconds between snapshots of a loader; with shorter intervals a resume is faster."""

    def __post_init__(self) -> None:
        capacity, multiple = self.task_encoder_seq_length, self.sample_multiple
        check(
            *at_least_one(
                self, "sample_multiple", "packing_buffer_size", "max_samples_per_sequence"
            ),
            (
                capacity >= 1 and capacity % max(multiple, 1) == 0,
                f"task_encoder_seq_length={capacity} must be a positive multiple of"
                f" sample_multiple={multiple}",
            ),
            *not_negative(self, "num_workers", "shuffle_buffer_size"),
            within(self, "max_bad_fraction", 0, 1),
            (
                not (self.path and self.blend),
                "path and blend are both set; keep one of them",
            ),
            (
                self.balance_packs >= 2,
                f"balance_packs={self.balance_packs} must be at least 2, to choose from",
            ),
            (len(self.mock_samples) > 0, "mock_samples is empty; give at least one geometry"),
            *positive(self, "checkpoint_every_sec"),
            # Upper bounds on samples and packs held in memory, and on processes.
            *numbers(
                self,
                packing_buffer_size=10**6,
                shuffle_buffer_size=10**7,
                balance_packs=10**5,
                num_workers=1024,
                checkpoint_every_sec=1e9,
            ),
        )
