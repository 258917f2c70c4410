"""Loaders under the names of NeMo AutoModel, over this project's shards and AutoModel's caches.

A configuration of AutoModel names TextToVideoDataloaderConfig or TextToImageDataloaderConfig as its
`_target_`, with a folder of `data_prep` as `cache_dir`, and keeps its other keys. AutoModel's
functions that build loaders are here under their names, too, for trainers that call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from dit.data.export.batches import VideoBatches, image_batch
from dit.data.export.caches import open_samples
from dit.data.export.order import BucketSampler
from dit.data.export.samples import NumberedSamples, of_card
from dit.data.rejections import DataError


class BucketLoader(DataLoader[dict[str, Any]]):
    """torch's DataLoader, with a state that counts the batches it has returned."""

    def __init__(self, samples: NumberedSamples, sampler: BucketSampler, **options: Any):
        super().__init__(samples, batch_sampler=sampler, **options)
        self._batches = sampler
        self._place = (-1, 0, False)  # epoch, batches handed out, whether they were all

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # a generator is one
        state = self._batches.state_dict()
        epoch, handed = state["epoch"], self._batches.start
        for batch in super().__iter__():
            handed += 1
            self._place = (epoch, handed, False)
            yield batch
        self._place = (epoch, handed, True)

    def state_dict(self) -> dict[str, Any]:
        """The state after the returned batches, equal on every rank."""
        state = self._batches.state_dict()
        epoch, handed, ended = self._place
        if epoch != state["epoch"]:
            return state
        return state | {"batches_yielded": handed, "ended": ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the batch after the last returned one.

        Raises:
            ValueError: the state belongs to another order of samples.
        """
        self._batches.load_state_dict(state)
        self._place = (-1, 0, False)


class Loaders(NamedTuple):
    """Loader and sampler, under the names that AutoModel's recipe reads."""

    dataloader: DataLoader[dict[str, Any]]
    sampler: BucketSampler


@dataclass(frozen=True, kw_only=True)
class _LoaderConfig:
    """Settings of both loaders: AutoModel's names and defaults, then this project's own."""

    cache_dir: Path | str
    """A folder of data_prep's shards, or a cache of AutoModel."""
    base_resolution: Sequence[int]
    """(width, height) at which a dynamic batch has `batch_size` samples."""
    drop_last: bool = True
    """Leave out the last batch of a bucket if it is not full."""
    shuffle: bool = True
    dynamic_batch_size: bool = False
    """Give smaller pictures larger batches, so that all batches have about as many pixels."""
    num_workers: int
    pin_memory: bool = True
    prefetch_factor: int = 2
    split: str = "train"
    seed: int = 42
    stateful: bool = True
    """Make the loader a subclass of torchdata's StatefulDataLoader, besides BucketLoader."""

    def _loaders(
        self,
        samples: NumberedSamples,
        collate: Callable[..., Any],
        batch_size: int,
        ranks: tuple[int, int],
    ) -> Loaders:
        width, height = self.base_resolution
        sampler = BucketSampler(
            samples,
            batch_size=batch_size,
            ranks=ranks,
            base_resolution=(width, height) if self.dynamic_batch_size else None,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
            seed=self.seed,
        )
        loader_class = _stateful_bucket_loader() if self.stateful else BucketLoader
        loader = loader_class(
            samples,
            sampler,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            collate_fn=collate,
        )
        return Loaders(loader, sampler)


@dataclass(frozen=True, kw_only=True)
class TextToVideoDataloaderConfig(_LoaderConfig):
    """Settings of a loader of videos, under AutoModel's names."""

    model_type: str | None = None
    device: str = "cpu"
    base_resolution: Sequence[int] = (512, 512)
    num_workers: int = 2
    text_length: int | None = None
    """Text tokens in each sample after padding. By default the text encoder's limit in the dataset
    card, or the length of the longest text if that is larger."""

    def build(self, *, dp_rank: int = 0, dp_world_size: int = 1, batch_size: int = 1) -> Loaders:
        """Opens the folder `cache_dir` and returns its loader and sampler.

        Ranks are data-parallel ranks; those that share a sample, as in tensor parallelism, count as
        one. `batch_size` is the number of samples in a batch of one rank.

        Raises:
            DataError: the folder cannot be read, or no bucket fills a batch.
            ValueError: an argument cannot be used.
            ImportError: torchdata is not installed, and `stateful` is true.
        """
        if self.device != "cpu":
            raise ValueError(
                f"device={self.device!r} is not possible, because batches are made on the CPU;"
                " leave device out, and move the batches in the training loop"
            )
        samples = open_samples(self.cache_dir, split=self.split)
        _check_model(samples, self.model_type)
        most = of_card(samples.card, "text_encoder", "max_length")
        length = self.text_length or max(samples.longest_text, most if type(most) is int else 0)
        if length < samples.longest_text:
            raise ValueError(
                f"text_length={length} is too small: a text of {self.cache_dir} has"
                f" {samples.longest_text} rows; give at least that many"
            )
        collate = VideoBatches(text_length=length)
        return self._loaders(samples, collate, batch_size, (dp_rank, dp_world_size))


@dataclass(frozen=True, kw_only=True)
class TextToImageDataloaderConfig(_LoaderConfig):
    """Settings of a loader of pictures, under AutoModel's names."""

    train_text_encoder: bool = False
    base_resolution: Sequence[int] = (256, 256)
    num_workers: int = 4

    def build(self, *, dp_rank: int = 0, dp_world_size: int = 1, batch_size: int = 1) -> Loaders:
        """Opens the folder `cache_dir` of pictures, and returns its loader and sampler.

        Raises:
            DataError: the folder cannot be read, holds videos, or no bucket fills a batch.
            ValueError: an argument cannot be used.
            ImportError: torchdata is not installed, and `stateful` is true.
        """
        if self.train_text_encoder:
            raise ValueError(
                "train_text_encoder=True needs token ids, but shards hold the outputs of a text"
                " encoder; leave train_text_encoder out"
            )
        samples = open_samples(self.cache_dir, split=self.split)
        if any(bucket.latent[1] > 1 for bucket in samples.buckets):
            raise DataError(
                f"{self.cache_dir} holds videos; read them with"
                " build_video_multiresolution_dataloader"
            )
        return self._loaders(samples, image_batch, batch_size, (dp_rank, dp_world_size))


def build_video_multiresolution_dataloader(
    *, batch_size: int = 1, dp_rank: int = 0, dp_world_size: int = 1, **config: Any
) -> Loaders:
    """Loader and sampler of videos, as AutoModel's function of this name returns them."""
    made = TextToVideoDataloaderConfig(**config)
    return made.build(batch_size=batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size)


def build_text_to_image_multiresolution_dataloader(
    *, batch_size: int = 1, dp_rank: int = 0, dp_world_size: int = 1, **config: Any
) -> Loaders:
    """Loader and sampler of pictures, as AutoModel's function of this name returns them."""
    made = TextToImageDataloaderConfig(**config)
    return made.build(batch_size=batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size)


def stateful_class() -> Any:
    """The class StatefulDataLoader of torchdata.

    Raises:
        ImportError: torchdata is not installed; the message says how to do without it.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore
    except ImportError as error:
        raise ImportError(
            "stateful=True needs the package torchdata: pip install 'megatron-dit[trainers]', or"
            " give stateful=False for torch's DataLoader with the same state"
        ) from error
    return StatefulDataLoader


def _stateful_bucket_loader() -> type[BucketLoader]:
    """Subclass of BucketLoader that AutoModel's recipe recognises as stateful, and therefore saves.

    Its state fits any number of workers.

    Raises:
        ImportError: torchdata is not installed.
    """
    return type("StatefulBucketLoader", (BucketLoader, stateful_class()), {})


def _check_model(samples: NumberedSamples, model_type: str | None) -> None:
    """Raises ValueError if the latents were encoded for another model than `model_type`."""
    made_by = of_card(samples.card, "processor", "name")
    if model_type is None or not isinstance(made_by, str) or made_by == "unknown":
        return
    if not (model_type.startswith(made_by) or made_by.startswith(model_type)):
        raise ValueError(
            f"{model_type=}, but {samples.folder} was packed with --processor {made_by}; give the"
            " folder of that model, or leave model_type out"
        )
