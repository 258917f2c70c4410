"""Energon's chain of datasets for one rank, from folders or mock data to a loader.

read -> cook -> sift -> (repeat, blend, shuffle) -> pack -> deliver. Energon's own links are the
middle; encoder.py and streams.py hold ours.
"""

from __future__ import annotations

from typing import Any

from megatron.energon import get_train_dataset, get_val_dataset
from megatron.energon.errors import reraise_exception
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset

from dit.config import RunConfig
from dit.data.cook import Expected
from dit.data.datasets import DatasetSplit, energon_source, key_prefixes, val_split
from dit.data.energon.resumable_loader import ResumableLoader
from dit.data.energon.task_encoder import PackEncoder
from dit.data.energon.worker_shards import ReaderConfig
from dit.data.mock import MockDataset
from dit.data.rejections import Bound, ReaderCounts
from dit.data.shared_memory import PackBuffers

# Validation on mock data sees other samples than training with the same seed.
_MOCK_VAL = 0x76616C


def open_training(
    config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound, *, rank: int, world_size: int
) -> ResumableLoader:
    """Endless, shuffled; this rank's share of the samples, parted again among its workers."""
    worker_config = _worker_config(
        config, rank=rank, world_size=world_size, workers=config.dataset.num_workers
    )
    dataset = _train_dataset(config, leaves, bound, worker_config)
    return _open(dataset, config, ahead=_packs_of_a_step(config, world_size))


def open_validation(
    config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound
) -> ResumableLoader:
    """Every sample once, in stored order, read in this process whatever the layout."""
    worker_config = _worker_config(config, rank=0, world_size=1, workers=0)
    return _open(_val_dataset(config, leaves, bound, worker_config), config, ahead=0)


def _worker_config(config: RunConfig, *, rank: int, world_size: int, workers: int) -> ReaderConfig:
    return ReaderConfig(
        rank=rank,
        world_size=world_size,
        num_workers=workers,
        seed_offset=config.rng.seed,
        # What a sample can do wrong is counted in our own links; anything else is a bug to see.
        global_error_handler=reraise_exception,
    )


def _open(dataset: SavableDataset, config: RunConfig, *, ahead: int) -> ResumableLoader:
    every = config.dataset.checkpoint_every_sec
    return ResumableLoader(dataset, checkpoint_every_sec=every, ahead=ahead)


def _packs_of_a_step(config: RunConfig, world_size: int) -> int:
    return config.train.global_batch_size // world_size


def _encoder(
    config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound, worker_config: ReaderConfig
) -> PackEncoder:
    rows = PackBuffers(
        worker_config.num_workers,
        size=Expected.of(config).pack_bytes,
        held=2 * _packs_of_a_step(config, worker_config.world_size),  # this step's and the next's
    )
    counts = ReaderCounts(bound, readers=max(1, worker_config.num_workers))
    return PackEncoder(config, sources=key_prefixes(leaves), rows=rows, counts=counts)


def _train_dataset(
    config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound, worker_config: ReaderConfig
) -> SavableDataset:
    encoder = _encoder(config, leaves, bound, worker_config)
    data = config.dataset
    if data.mock:
        mock = MockDataset(config, seed=config.rng.seed, worker_config=worker_config)
        return encoder.build_train_datasets(
            datasets=[LoadedDataset(dataset=mock)],
            worker_config=worker_config,
            batch_size=None,
            packing_buffer_size=data.packing_buffer_size,
            shuffle_buffer_size=data.shuffle_buffer_size,
        )
    source: Any = energon_source(data, split="train")  # may be a dict, which Energon's types omit
    return get_train_dataset(
        source,
        worker_config=worker_config,
        batch_size=None,
        packing_buffer_size=data.packing_buffer_size,
        shuffle_buffer_size=data.shuffle_buffer_size,
        max_samples_per_sequence=data.max_samples_per_sequence,
        task_encoder=encoder,
    )


def _val_dataset(
    config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound, worker_config: ReaderConfig
) -> SavableDataset:
    encoder = _encoder(config, leaves, bound, worker_config)
    data = config.dataset
    unbatched: Any = None  # our packs are the batches; Energon's types say int
    if data.mock:
        seed = config.rng.seed ^ _MOCK_VAL
        mock = MockDataset(config, seed=seed, worker_config=worker_config)
        return encoder.build_val_datasets(
            datasets=[LoadedDataset(dataset=mock)],
            worker_config=worker_config,
            batch_size=unbatched,
            packing_buffer_size=data.packing_buffer_size,
        )
    split = val_split(data)
    source: Any = energon_source(data, split=split)
    return get_val_dataset(
        source,
        split_part=split,
        worker_config=worker_config,
        batch_size=unbatched,
        packing_buffer_size=data.packing_buffer_size,
        task_encoder=encoder,
    )
