"""Synthetic samples of any geometry: a dataset without files that Energon reads like any other.

Records have the parts and types of those in shards, so mock data pass through all stages of real
data. Sample i is a function of (seed, i); reader r of R reads samples r, r + R, r + 2R, ...
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
from megatron.energon import CrudeSample
from megatron.energon.cache import FileStore
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.source_info import SourceInfo
from megatron.energon.state import FlexState
from torch import Tensor

from dit.config import MockGeometry, ModelConfig, RunConfig
from dit.data.energon.worker_shards import ReadCounts, ReaderConfig, Remaining, WorkerShard
from dit.models.family import InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.token_ids import as_digits

_ENDLESS = 2**31


def mock_record(config: RunConfig, *, seed: int, index: int) -> dict[str, bytes]:
    """Parts (extension -> bytes) of mock sample `index`, in the form of a record in a shard.

    Latent and inputs are bfloat16: normal numbers, or token ids. The sample has every required
    input. About half of the samples have the optional ones, and in a quarter a text that may be
    empty has no tokens.
    """
    geometries = config.dataset.mock_samples
    drawn = np.random.SeedSequence((seed, index)).generate_state(2, np.uint64)
    mixed, choice = map(int, drawn)
    geometry = _pick(geometries, choice / 2**64)
    rng = torch.Generator().manual_seed(mixed)
    size = (config.model.in_channels, geometry.frames, geometry.height, geometry.width)
    tensors = {"latent": torch.randn(size, generator=rng).bfloat16()}
    for one in PatchLayout.of_training(config).inputs:
        if one.required or mixed & 1:
            rows = 0 if one.may_be_empty and mixed & 6 == 0 else geometry.text_length
            shape = _shape(one, config.model, geometry, rows=rows)
            tensors[one.name] = _drawn(one, shape, rng).bfloat16()
    payload = safetensors.torch.save(tensors)
    about = {
        "format_version": 1,
        "caption": f"mock sample {index}",
        "fps": geometry.fps,
        "crc32": {"safetensors": f"{zlib.crc32(payload):08x}"},
    }
    return {"safetensors": payload, "json": json.dumps(about).encode()}


def _drawn(one: SampleInput, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Random values for the input `one`: normal numbers, or token ids if it has a vocabulary.

    Token ids are a quarter fewer than text tokens, as from another tokenizer.
    """
    if one.vocabulary is None:
        return torch.randn(shape, generator=rng)
    rows = shape[0] - shape[0] // 4
    return as_digits(torch.randint(one.vocabulary, (rows,), generator=rng))


def _shape(
    one: SampleInput, model: ModelConfig, geometry: MockGeometry, *, rows: int
) -> tuple[int, ...]:
    sides, channels = (geometry.height, geometry.width), model.in_channels
    match one.kind:
        case InputKind.TEXT:
            return one.rows or rows, one.width
        case InputKind.NULL_TEXT:  # no longer than the text, whose room it takes
            return (rows + 1) // 2, one.width
        case InputKind.VECTOR:
            return (one.width,)
        case InputKind.CHANNELS:
            return one.width, geometry.frames, *sides
        case InputKind.REFERENCE | InputKind.REJECTED:
            return channels, geometry.frames, *sides
        case InputKind.SOUND:
            return one.width, 4 * geometry.frames  # of any rate
        case InputKind.FRAMES | InputKind.FRAME_CHANNELS:
            return channels, model.patch_temporal, *sides


def _pick(geometries: tuple[MockGeometry, ...], position: float) -> MockGeometry:
    """One of `geometries`, which divide [0, 1) by weight: the one at `position`."""
    position *= sum(geometry.weight for geometry in geometries)
    for geometry in geometries:
        position -= geometry.weight
        if position < 0:
            return geometry
    return geometries[-1]


class MockDataset(BaseCoreDatasetFactory[CrudeSample]):
    """A mock dataset in place of a folder of shards, for Energon."""

    __sample_type__ = CrudeSample

    def __init__(self, config: RunConfig, *, seed: int, worker_config: ReaderConfig):
        self.config = config
        self.seed = seed
        self.worker_config = worker_config
        self.paths = []
        self.subflavors = {}

    def build(self, worker_rotation_offset: int = 0) -> MockReader:
        del worker_rotation_offset  # evens out remainders, and an endless dataset has none
        return MockReader(self.config, seed=self.seed, worker_config=self.worker_config)

    def as_file_store(self) -> FileStore:
        raise NotImplementedError("mock data have no files; use a dataset of dataset.path for that")

    def __len__(self) -> int:
        return _ENDLESS


class MockReader(SavableDataset[CrudeSample]):
    """The mock samples of one reader: r, r + R, r + 2R, ... for R readers over all ranks."""

    _savable_fields = ("_drawn",)

    def __init__(self, config: RunConfig, *, seed: int, worker_config: ReaderConfig):
        super().__init__(worker_config)
        self._readers = worker_config.readers
        self._config = config
        self._seed = seed
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._drawn = 0

    def start_at(self, first: int) -> None:
        """Continues with this reader's first sample whose index is `first` or more."""
        reader = self.worker_config.global_worker_id()
        self._drawn = draws_below(first, reader=reader, readers=self._readers)

    def len_worker(self, worker_idx: int | None = None) -> int:
        del worker_idx
        return _ENDLESS

    def worker_has_samples(self) -> bool:
        return True

    def __iter__(self) -> Iterator[CrudeSample]:
        reader = self.worker_config.global_worker_id()
        while True:
            index = reader + self._drawn * self._readers
            self._drawn += 1
            yield self.restore_sample(("Mock", index))

    def can_restore_sample(self) -> bool:
        return True

    def restore_sample(self, restore_key: Any) -> CrudeSample:
        _, index = restore_key
        source = SourceInfo(
            dataset_path=EPath("/mock"), index=index, shard_name="mock", file_names=()
        )
        return CrudeSample(
            __key__=f"mock-{index}",
            __restore_key__=("Mock", index),
            __sources__=(source,),
            **mock_record(self._config, seed=self._seed, index=index),
        )

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "seed": self._seed}


class MockShard(WorkerShard):
    """The bottom stage of mock data, which have no end."""

    def read(self, index: int) -> Any:
        return self.dataset.restore_sample(("Mock", index))

    def start_at(self, first: int) -> None:
        reader: Any = self.dataset
        reader.start_at(first)

    def reads(self, states: Sequence[FlexState | Remaining]) -> ReadCounts:
        readers = len(states)
        drawn = [
            draws_below(state.first, reader=reader, readers=readers)
            if isinstance(state, Remaining)
            else state["_drawn"]
            for reader, state in enumerate(states)
        ]
        ends = [reader + (n - 1) * readers + 1 for reader, n in enumerate(drawn) if n]
        times = np.zeros(max(ends, default=0), np.int32)
        for reader, n in enumerate(drawn):
            times[reader : reader + n * readers : readers] = 1
        return ReadCounts(begin=0, times=times, cuts=np.zeros(len(times), bool))


def draws_below(first: int, *, reader: int, readers: int) -> int:
    """How many of the indices `reader`, `reader` + `readers`, ... are below `first`."""
    return -((reader - first) // readers)
