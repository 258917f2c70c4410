"""Energon's task encoder: shard record -> PackedBatch, in the loader's processes.

1. cook    record -> CookedSample            its length, from its head; refused ones are counted
2. group   samples -> groups that fit        the oldest sample and what fills its pack
3. pack    group -> PackedBatch              reads and decodes; pads each to sample_multiple
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.energon import Cooker, CrudeSample, TaskEncoder, WorkerConfig, stateless
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from dit.batch import LatentSample
from dit.config import Balance, RunConfig
from dit.data.cook import Expected, SampleSize, cook, measure_sample
from dit.data.energon.packing_stages import FlopsBalancedOrder, OldestFirst, SampleGroup
from dit.data.energon.readers import (
    UNREADABLE,
    CookedSample,
    Cooking,
    SafeReader,
    read_parts,
)
from dit.data.energon.worker_output import FinishedPack, WorkerOutput
from dit.data.energon.worker_shards import FolderShard, WorkerShard, sample_id
from dit.data.mock import MockShard
from dit.data.pack import Extent, PackWriter, common_dtype
from dit.data.rejections import DataError, ReaderCounts, Reject, SampleRefused
from dit.data.shared_memory import PackBuffers
from dit.data.tar.file_cache import OpenShards
from dit.data.tar.reader import PLACE, SampleLocation
from dit.models.cost import forward_flops


class PackEncoder(TaskEncoder):
    """One per loader. All its steps are stateless and draw no random number.

    That makes a resume exact: Energon cooks the samples of a saved buffer again.
    """

    decoder = None  # parts stay bytes: the cooker decodes, and knows shard and key when it fails

    def __init__(
        self,
        config: RunConfig,
        *,
        sources: Mapping[str, str],
        rows: PackBuffers,
        counts: ReaderCounts,
    ):
        """`sources` maps the path of each dataset of a blend to the prefix of its keys."""
        self.expected = Expected.of(config)
        self.data = config.dataset
        self.model = config.model
        self.seed = config.rng.seed
        self.sources = sources
        self._counts = counts
        self._shards = (
            OpenShards()
        )  # of all datasets, so that a blend of many has not too many open
        self._rows = rows
        self._before = 0  # samples of the datasets that have been opened
        self.cookers = [Cooker(self.cook)]  # Energon asks for one; Cooking is what calls it

    @stateless
    def cook(self, record: dict[str, Any]) -> CookedSample:
        origin = record["__sources__"][0]
        source = self.sources.get(str(origin.dataset_path), "") if self.sources else ""
        key = f"{source}/{record['__key__']}" if source else record["__key__"]
        cooked = CookedSample(
            __key__=key,
            __restore_key__=record["__restore_key__"],
            origin=origin,
            stored_key=record["__key__"],
        )
        # Where a record has a place, that alone is kept, so a buffer of large samples is small.
        load = partial(self._load, record.get(PLACE, record), key, source)
        try:
            measured = measure_sample(record, self.expected)
            if measured is None:
                sample = _lasting(load()) if PLACE in record else load()
                measured = SampleSize.of(sample.latent_CFHW, sample.text_LE, self.expected.layout)
                load = lambda: sample  # noqa: E731 - decoded for its length, so it stays so
        except SampleRefused as refusal:
            # Without its traceback, which would keep the payload alive.
            cooked.refusal = refusal.with_traceback(None)
            return cooked
        cooked.load, cooked.measured = load, measured
        return cooked

    def _load(self, record: SampleLocation | dict[str, Any], key: str, source: str) -> LatentSample:
        """All of a sample.

        Raises:
            Refused: there is something wrong with it.
        """
        parts = read_parts(record) if isinstance(record, SampleLocation) else record
        if UNREADABLE in parts:
            raise SampleRefused(Reject.UNREADABLE, parts[UNREADABLE])
        return cook(parts, self.expected, key=key, source=source)

    @stateless
    def group(self, samples: list[CookedSample]) -> SampleGroup:
        # Equal ones side by side, which attention computes together.
        samples = sorted(samples, key=lambda sample: sample.size.shape)
        tokens, text = zip(*(sample.size.shape for sample in samples), strict=True)
        return SampleGroup(
            __key__=samples[0].__key__,
            __restore_key__=(),  # Energon sets it
            samples=tuple(samples),
            cost=float(forward_flops(self.model, tokens=tokens, text=text)),
        )

    @stateless
    def pack(self, group: SampleGroup) -> FinishedPack:
        writer, samples, refused = self._writer(group), [], []
        for sample in group.samples:
            of = sample_id(sample.__restore_key__)
            try:
                writer.add(self._chosen(sample))
                samples.append(of)
            except SampleRefused as refusal:
                refused.append((sample.refused(refusal), of))
        return FinishedPack(
            pack=writer.finish() if samples else None,
            samples=tuple(samples),
            refused=tuple(refused),
        )

    def _writer(self, group: SampleGroup) -> PackWriter:
        expected, sizes = self.expected, [sample.size for sample in group.samples]
        return PackWriter(
            expected.layout,
            samples=len(sizes),
            latent=Extent(
                rows=sum(size.tokens for size in sizes),
                width=expected.channels * math.prod(expected.layout.patch),
                dtype=common_dtype(size.dtypes[0] for size in sizes),
            ),
            text=Extent(
                rows=sum(size.shape[1] for size in sizes),
                width=expected.text_width,
                dtype=common_dtype(size.dtypes[1] for size in sizes),
            ),
            memory=self._rows.free,
        )

    def _chosen(self, sample: CookedSample) -> LatentSample:
        assert sample.load is not None
        latent = sample.load()
        found = SampleSize.of(latent.latent_CFHW, latent.text_LE, self.expected.layout)
        if found != sample.size:
            raise SampleRefused(
                Reject.UNREADABLE, "the shard has been changed while the sample waited"
            )
        return latent

    def _load_dataset(
        self, dataset: LoadedDataset, worker_rotation_offset: int, worker_config: WorkerConfig
    ) -> SavableDataset[CookedSample]:
        """Energon's shard reading and cooking, made safe against damage and counted."""
        if dataset.dataset.__sample_type__ is not CrudeSample or dataset.aux:
            raise DataError("a metadataset with `join` or `aux` cannot be read here; blend instead")
        built = dataset.dataset.build(worker_rotation_offset=worker_rotation_offset)
        share = self._shared(built, dataset.dataset, worker_config)
        return Cooking(share, self.cook, self._counts, worker_config=worker_config)

    def _shared(self, built: SavableDataset, factory: Any, worker_config: Any) -> WorkerShard:
        """Shards that are safe to read, and each reader's share of them."""
        if not isinstance(built, MapDataset):
            return MockShard(built, worker_config=worker_config)
        loader: Any = built.dataset
        loader.join_readers = [SafeReader(reader, self._shards) for reader in loader.join_readers]
        before, self._before = self._before, self._before + len(factory)
        return FolderShard(loader, factory=factory, before=before, worker_config=worker_config)

    def build_batch(
        self,
        dataset: SavableDataset[CookedSample],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset:
        """Packs are the batches: whole ones leave the worker."""
        assert batch_size is None and not batch_drop_last and packing_buffer_size is not None
        groups: SavableDataset = OldestFirst(
            dataset,
            buffer_size=packing_buffer_size,
            capacity=self.expected.capacity,
            final_packer=self.group,
            worker_config=worker_config,
        )
        if self.data.balance is Balance.FLOPS:
            groups = FlopsBalancedOrder(
                groups,
                packs=self.data.balance_packs,
                seed=self.seed,
                worker_config=worker_config,
            )
        packs = MapDataset(groups, self.pack, stateless_map_fn=True, worker_config=worker_config)
        return WorkerOutput(packs, self._counts, self._rows, worker_config=worker_config)


def _lasting(sample: LatentSample) -> LatentSample:
    """With tensors that stay when other samples are read."""
    latent_CFHW, text_LE = sample.latent_CFHW.clone(), sample.text_LE.clone()
    return replace(sample, latent_CFHW=latent_CFHW, text_LE=text_LE)
