"""Loaders under the names of NeMo AutoModel, over our shards.

A configuration of AutoModel names one of these functions as its `_target_`, with a folder of
`data_prep` as `cache_dir`, and keeps its other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dit.data.export.batches import VideoBatches, image_batch
from dit.data.export.buckets import BucketSampler
from dit.data.export.shard_samples import ShardSamples
from dit.data.rejections import DataError

Loaders = tuple[DataLoader[dict[str, Any]], BucketSampler]


class BucketLoader(DataLoader[dict[str, Any]]):
    """torch's DataLoader with a state: the batches that were handed out, not those read ahead."""

    def __init__(self, samples: ShardSamples, sampler: BucketSampler, **options: Any):
        super().__init__(samples, batch_sampler=sampler, **options)
        self._batches, self._place = sampler, (-1, 0)  # epoch, batches handed out

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # a generator is one
        state = self._batches.state_dict()
        epoch, handed = state["epoch"], self._batches.start
        for batch in super().__iter__():
            handed += 1
            self._place = (epoch, handed)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """As that of the sampler; the same on every rank."""
        state = self._batches.state_dict()
        epoch, handed = self._place
        return state | {"batches_yielded": handed} if epoch == state["epoch"] else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the batch after the last one that was handed out.

        Raises:
            ValueError: the state is of another order of samples.
        """
        self._batches.load_state_dict(state)
        self._place = (-1, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """What both loaders take; the names and defaults of AutoModel, then our own."""

    base_resolution: tuple[int, int]
    """Width and height at which a dynamic batch has `batch_size` samples."""
    num_workers: int
    batch_size: int = 1
    """Samples in a batch of one rank."""
    dp_rank: int = 0
    dp_world_size: int = 1
    """Data-parallel ranks; those that share a sample, as with tensor parallelism, are one."""
    drop_last: bool = True
    """Whether the last batch of a bucket is left out where it is not full."""
    shuffle: bool = True
    dynamic_batch_size: bool = False
    """Whether smaller pictures have larger batches, so that all have about as many pixels."""
    pin_memory: bool = True
    prefetch_factor: int = 2
    split: str = "train"
    seed: int = 42
    stateful: bool = True
    """Whether the loader is torchdata's StatefulDataLoader, else a BucketLoader."""


def build_video_multiresolution_dataloader(
    *,
    cache_dir: Path | str,
    model_type: str | None = None,
    device: str = "cpu",
    base_resolution: tuple[int, int] = (512, 512),
    num_workers: int = 2,
    text_length: int | None = None,
    **options: Any,
) -> Loaders:
    """Batches of videos from a folder of data_prep; `options` are fields of LoaderOptions.

    Texts get `text_length` rows: by default as many as the text encoder takes, or the longest has.

    Raises:
        DataError: the folder cannot be read, or no bucket fills a batch.
        ValueError: an argument cannot be used.
        ImportError: torchdata is not installed, and `stateful` is true.
    """
    if device != "cpu":
        raise ValueError(f"{device=}: batches are made on the CPU; move them where they are used")
    given = LoaderOptions(base_resolution=base_resolution, num_workers=num_workers, **options)
    samples = ShardSamples(cache_dir, split=given.split)
    _check_model(samples, model_type)
    most = samples.card.get("text_encoder", {}).get("max_length")
    length = text_length or max(samples.longest_text, most if type(most) is int else 0)
    if length < samples.longest_text:
        raise ValueError(
            f"{text_length=} is too small: a text of {cache_dir} has {samples.longest_text} rows"
        )
    return _loaders(samples, VideoBatches(text_length=length), given)


def build_text_to_image_multiresolution_dataloader(
    *,
    cache_dir: Path | str,
    train_text_encoder: bool = False,
    base_resolution: tuple[int, int] = (256, 256),
    num_workers: int = 4,
    **options: Any,
) -> Loaders:
    """Batches of pictures from a folder of data_prep; `options` are fields of LoaderOptions.

    Raises:
        DataError: the folder cannot be read, holds videos, or no bucket fills a batch.
        ValueError: an argument cannot be used.
        ImportError: torchdata is not installed, and `stateful` is true.
    """
    if train_text_encoder:
        raise ValueError(
            "train_text_encoder=True needs token ids, and shards hold what a text encoder made of"
            " them; leave it out"
        )
    given = LoaderOptions(base_resolution=base_resolution, num_workers=num_workers, **options)
    samples = ShardSamples(cache_dir, split=given.split)
    if any(bucket.latent[1] > 1 for bucket in samples.buckets):
        raise DataError(
            f"{cache_dir} holds videos; build_video_multiresolution_dataloader reads them"
        )
    return _loaders(samples, image_batch, given)


def _loaders(samples: ShardSamples, collate: Callable[..., Any], given: LoaderOptions) -> Loaders:
    sampler = BucketSampler(
        samples,
        batch_size=given.batch_size,
        ranks=(given.dp_rank, given.dp_world_size),
        base_resolution=given.base_resolution if given.dynamic_batch_size else None,
        drop_last=given.drop_last,
        shuffle=given.shuffle,
        seed=given.seed,
    )
    workers = {
        "prefetch_factor": given.prefetch_factor if given.num_workers else None,
        "persistent_workers": given.num_workers > 0,
        "num_workers": given.num_workers,
        "pin_memory": given.pin_memory and torch.cuda.is_available(),
        "collate_fn": collate,
    }
    if not given.stateful:
        return BucketLoader(samples, sampler, **workers), sampler
    return stateful_class()(samples, batch_sampler=sampler, **workers), sampler


def stateful_class() -> Any:
    """StatefulDataLoader.

    Raises:
        ImportError: torchdata is not installed; the message says what to do.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore
    except ImportError as error:
        raise ImportError(
            "StatefulDataLoader is in torchdata: pip install 'megatron-dit[trainers]', or give"
            " stateful=False for torch's DataLoader with the same state"
        ) from error
    return StatefulDataLoader


def _check_model(samples: ShardSamples, model_type: str | None) -> None:
    """Raises ValueError where the latents are of another model's codec."""
    made_by = str(samples.card.get("processor", {}).get("name", "unknown"))
    if model_type is None or made_by == "unknown":
        return
    if not (model_type.startswith(made_by) or made_by.startswith(model_type)):
        raise ValueError(
            f"{model_type=}, and {samples.folder} was packed with --processor {made_by}; give the"
            " folder of that model, or leave model_type out"
        )
