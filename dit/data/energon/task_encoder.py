"""Opens Energon's chain of datasets for one rank, and encodes samples in the loader workers.

1. open_training      the loader of training packs, with the chain of a run's datasets
   open_validation    the chain of validation data, which yields groups of samples in stored order
2. PackEncoder        Energon's task encoder:
   cook     a record becomes a CookedSample: its length is read, or the sample is refused
   group    samples that fit one pack: the oldest sample and what fills its pack
   pack     a group becomes a PackedBatch: samples are decoded, and padded to sample_multiple

The stages are read, cook, (repeat, blend, shuffle), group, pack, output. Those in brackets are
Energon's; the others are in stages.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.energon import (
    Cooker,
    CrudeSample,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.errors import reraise_exception
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers.map_dataset import MapDataset
from torch import Tensor

from dit.batch import LatentSample
from dit.config import Balance, RngConfig, RunConfig, TrainConfig
from dit.data.cook import Expected, cook, measure_sample
from dit.data.datasets import DatasetSplit, energon_source, key_prefixes, val_split
from dit.data.energon.internals import DatasetOpener
from dit.data.energon.resumable_loader import ResumableLoader
from dit.data.energon.stages import (
    CookedSample,
    Cooking,
    FinishedPack,
    FlopsBalancedOrder,
    FlopsTargetOrder,
    OldestFirst,
    SampleGroup,
    WorkerOutput,
)
from dit.data.energon.worker_shards import FolderShard, ReaderConfig, WorkerShard, sample_id
from dit.data.mock import MockDataset, MockShard
from dit.data.pack import PackWriter, SampleSize
from dit.data.records import PLACE, UNREADABLE
from dit.data.rejections import Bound, DataError, ReaderCounts, Reject, SampleRefused
from dit.models.pass_work import PassWork
from dit.pack_wire import PackBuffers

if TYPE_CHECKING:
    from dit.data.tar_reader import OpenShards, SampleLocation

# Mixed into the seed: validation on mock data sees other samples than training.
_MOCK_VAL = 0x76616C


def open_training(
    config: RunConfig,
    leaves: tuple[DatasetSplit, ...],
    bound: Bound,
    *,
    rank: int,
    world_size: int,
    work: PassWork | None,
) -> ResumableLoader:
    """An endless shuffled loader of this rank's samples, which its workers divide.

    `work` computes the cost of packs, if `dataset.balance` needs it.
    """
    worker_config = _worker_config(
        config.rng, rank=rank, world_size=world_size, workers=config.dataset.num_workers
    )
    encoder = _encoder(config, leaves, bound, worker_config, packs=True, work=work)
    return ResumableLoader(
        _chain(config, encoder, worker_config, validation=False),
        checkpoint_every_sec=config.dataset.checkpoint_every_sec,
        ahead=_packs_of_a_step(config.train, world_size),
    )


def open_validation(
    config: RunConfig, leaves: tuple[DatasetSplit, ...], bound: Bound, work: PassWork | None
) -> tuple[PackEncoder, SavableDataset]:
    """(encoder, chain): the chain yields groups of validation samples, each sample once."""
    worker_config = _worker_config(config.rng, rank=0, world_size=1, workers=0)
    encoder = _encoder(config, leaves, bound, worker_config, packs=False, work=work)
    return encoder, _chain(config, encoder, worker_config, validation=True)


def _worker_config(rng: RngConfig, *, rank: int, world_size: int, workers: int) -> ReaderConfig:
    return ReaderConfig(
        rank=rank,
        world_size=world_size,
        num_workers=workers,
        seed_offset=rng.seed,
        # Our own stages count the faults of samples; any other error is a bug and must be seen.
        global_error_handler=reraise_exception,
    )


def _packs_of_a_step(train: TrainConfig, world_size: int) -> int:
    return train.global_batch_size // world_size


def _encoder(
    config: RunConfig,
    leaves: tuple[DatasetSplit, ...],
    bound: Bound,
    worker_config: ReaderConfig,
    *,
    packs: bool,
    work: PassWork | None,
) -> PackEncoder:
    buffers = PackBuffers(
        worker_config.num_workers,
        size=Expected.of_training(config).pack_bytes,
        # those of this step and of the next one
        held=2 * _packs_of_a_step(config.train, worker_config.world_size),
    )
    counts = ReaderCounts(bound, readers=max(1, worker_config.num_workers))
    sources = key_prefixes(leaves)
    parts: dict[str, Any] = {"sources": sources, "buffers": buffers, "counts": counts}
    return PackEncoder(config, **parts, packs=packs, work=work)


def _chain(
    config: RunConfig, encoder: PackEncoder, worker_config: ReaderConfig, *, validation: bool
) -> SavableDataset:
    data, split = config.dataset, val_split(config.dataset) if validation else "train"
    # Energon's types say int and str: our packs are the batches, and a source may be a dict.
    options: dict[str, Any] = {"worker_config": worker_config, "batch_size": None}
    options["packing_buffer_size"] = data.packing_buffer_size
    if not validation:
        options["shuffle_buffer_size"] = data.shuffle_buffer_size
    if data.mock:
        seed = config.rng.seed ^ (_MOCK_VAL if validation else 0)
        mock = MockDataset(config, seed=seed, worker_config=worker_config)
        build = encoder.build_val_datasets if validation else encoder.build_train_datasets
        return build(datasets=[LoadedDataset(dataset=mock)], **options)
    source: Any = energon_source(data, split=split)
    options["task_encoder"] = encoder
    if validation:
        return get_val_dataset(source, split_part=split, **options)
    most = data.max_samples_per_sequence
    return get_train_dataset(source, max_samples_per_sequence=most, **options)


class PackEncoder(DatasetOpener):
    """Energon's task encoder of one loader.

    All steps are stateless and draw no random numbers, so a resume is exact although Energon cooks
    the samples of a saved buffer again.
    """

    decoder = None  # parts stay bytes: `cook` decodes them, and can name shard and key in errors

    def __init__(
        self,
        config: RunConfig,
        *,
        sources: Mapping[str, str],
        buffers: PackBuffers,
        counts: ReaderCounts,
        packs: bool,
        work: PassWork | None,
    ):
        """Creates the encoder for the run that `config` describes.

        `sources` maps the path of each dataset of a blend to the prefix of its keys. With `packs`
        the chain makes packs, else it ends with groups of samples.
        """
        balanced = config.dataset.balance is not Balance.NONE
        assert work is not None or not balanced, "dataset.balance needs `work`, the cost of packs"
        self.expected = Expected.of_training(config) if packs else Expected.of(config)
        self.data = config.dataset
        self.work = work if balanced else None
        self.seed = config.rng.seed
        self.sources = sources
        self.counts = counts
        self._packs = packs
        # One for all datasets, so that a blend of many datasets has not too many files open.
        self._shards: OpenShards | None = None
        self._buffers = buffers
        self._before = 0  # samples of the datasets that have been opened so far
        self.cookers = [Cooker(self.cook)]  # Energon asks for one; it is Cooking that calls `cook`

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
        # A large record has its location. Only that is kept, so a buffer of large samples is small.
        where = (record.get(PLACE, record), key, source)
        try:
            measured = measure_sample(record, self.expected)
            load = partial(self._load_again, *where, measured)
            if measured is None:
                sample = self._load(*where)
                sample = _lasting(sample) if PLACE in record else sample
                measured = SampleSize.of(sample, self.expected.layout)
                load = lambda: sample  # noqa: E731 - it had to be decoded for its length
        except SampleRefused as refusal:
            # Without its traceback, which would keep the payload alive.
            cooked.refusal = refusal.with_traceback(None)
            return cooked
        cooked.load, cooked.measured = load, measured
        if self.data.balance is Balance.FLOPS_TARGET:
            trained = self.expected.layout.trained(*measured.shape)
            cooked.cost = self._cost(trained, [measured.sound] * len(trained))
        return cooked

    def _load(self, record: SampleLocation | dict[str, Any], key: str, source: str) -> LatentSample:
        """Reads and decodes a whole sample, from its location or from its record.

        Raises:
            SampleRefused: the sample is faulty.
        """
        if not isinstance(record, dict):
            from dit.data.energon.shard_reader import read_parts  # mock data have no shards

            record = read_parts(record)
        if UNREADABLE in record:
            raise SampleRefused(Reject.UNREADABLE, record[UNREADABLE])
        return cook(record, self.expected, key=key, source=source)

    def _load_again(
        self,
        record: SampleLocation | dict[str, Any],
        key: str,
        source: str,
        size: SampleSize,
    ) -> LatentSample:
        """Reads and decodes a sample whose `size` is known from its head.

        Raises:
            SampleRefused: the sample is faulty, or its size has changed.
        """
        sample = self._load(record, key, source)
        if SampleSize.of(sample, self.expected.layout) != size:
            raise SampleRefused(
                Reject.UNREADABLE,
                "the shard has been changed since the head of the sample was read; do not change"
                " the shards during a run",
            )
        return sample

    @stateless
    def group(self, samples: list[CookedSample]) -> SampleGroup:
        # Samples of equal size lie side by side: attention computes them together.
        samples = sorted(samples, key=lambda sample: sample.size.shape)
        trained = self.expected.layout.trained
        shapes = [(s, one.size.sound) for one in samples for s in trained(*one.size.shape)]
        return SampleGroup(
            __key__=samples[0].__key__,
            __restore_key__=(),  # Energon sets it
            samples=tuple(samples),
            cost=self._cost(*zip(*shapes, strict=True)),
        )

    def _cost(self, samples: Sequence[tuple[int, int]], sound: Sequence[int]) -> float:
        if self.work is None:
            return 0.0
        tokens, text = zip(*samples, strict=True)
        return float(self.work.flops(tokens, text, sound))

    @stateless
    def pack(self, group: SampleGroup) -> FinishedPack:
        writer = PackWriter(
            self.expected.layout,
            [sample.size for sample in group.samples],
            channels=self.expected.channels,
            memory=self._buffers.free,
        )
        samples, refused = [], []
        for sample in group.samples:
            number = sample_id(sample.__restore_key__)
            try:
                assert sample.load is not None
                writer.add(sample.load())
                samples.append(number)
            except SampleRefused as refusal:
                refused.append((sample.refused(refusal), number))
        return FinishedPack(
            pack=writer.finish() if samples else None,
            samples=tuple(samples),
            refused=tuple(refused),
        )

    def open_dataset(
        self, dataset: LoadedDataset, worker_rotation_offset: int, worker_config: WorkerConfig
    ) -> SavableDataset[CookedSample]:
        """The chain that reads, cooks and counts one dataset, safe against damaged shards.

        Raises:
            DataError: the metadataset joins datasets, or has auxiliary ones.
        """
        if dataset.dataset.__sample_type__ is not CrudeSample or dataset.aux:
            key = "aux" if dataset.aux else "join"
            raise DataError(
                f"the metadataset at dataset.path or dataset.blend has `{key}`, which this project"
                " cannot read; list its folders under `blend` in that file instead"
            )
        built = dataset.dataset.build(worker_rotation_offset=worker_rotation_offset)
        shard = self._shard(built, dataset.dataset, worker_config)
        return Cooking(shard, self.cook, self.counts, worker_config=worker_config)

    def _shard(self, built: SavableDataset, factory: Any, worker_config: Any) -> WorkerShard:
        """The lowest stage of a dataset, which reads the slices of each reader.

        `factory` is Energon's description of the dataset, and `built` the chain that it built. For
        a folder, the chain's readers of shards are replaced by SafeReaders.
        """
        if not isinstance(built, MapDataset):
            return MockShard(built, worker_config=worker_config)
        from dit.data.energon.shard_reader import SafeReader  # mock data have no shards
        from dit.data.tar_reader import OpenShards

        sound = self.expected.layout.sound is not None
        shards = self._shards = self._shards or OpenShards(with_sound=sound)
        loader: Any = built.dataset
        loader.join_readers = [SafeReader(reader, shards) for reader in loader.join_readers]
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
        """Extends the chain `dataset` from samples to packs, each of which is a batch of its own.

        For validation the chain ends before that, with groups of samples.
        """
        assert batch_size is None and not batch_drop_last and packing_buffer_size is not None
        groups: SavableDataset = OldestFirst(
            dataset,
            buffer_size=packing_buffer_size,
            capacity=self.expected.capacity,
            at_like_cost=self.data.balance is Balance.FLOPS_TARGET,
            final_packer=self.group,
            worker_config=worker_config,
        )
        orders = {Balance.FLOPS: FlopsBalancedOrder, Balance.FLOPS_TARGET: FlopsTargetOrder}
        if order := orders.get(self.data.balance):
            groups = order(
                groups,
                packs=self.data.balance_packs,
                seed=self.seed,
                worker_config=worker_config,
            )
        if not self._packs:
            return groups
        packs = MapDataset(groups, self.pack, stateless_map_fn=True, worker_config=worker_config)
        return WorkerOutput(packs, self.counts, self._buffers, worker_config=worker_config)


def _lasting(sample: LatentSample) -> LatentSample:
    """A copy of the sample whose tensors stay valid when other samples are read."""
    tensors = {f.name: getattr(sample, f.name) for f in fields(sample)}
    copies = {k: v.clone() for k, v in tensors.items() if isinstance(v, Tensor)}
    others = {name: values.clone() for name, values in sample.others.items()}
    return replace(sample, others=others, **copies)
