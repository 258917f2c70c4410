"""Who gets which sample, and that a stopped loader goes on with the very next batch."""

from __future__ import annotations

import builtins
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dit.data.export import (
    BucketLoader,
    BucketSampler,
    SampleStream,
    ShardSamples,
    build_video_multiresolution_dataloader,
)
from dit.data.export.loaders import stateful_class
from dit.data.export.order import dynamic_batch_size

COUNT, WORLD = 45, 4  # samples of seven sizes, five or so each; no bucket divides by the ranks


@pytest.fixture(scope="module")
def folder(shards, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards.good_set(tmp_path_factory.mktemp("shards") / "data", COUNT)


def numbers(batch: dict[str, Any]) -> list[int]:
    """Which samples these are: the first channel of each latent is its number."""
    return batch["video_latents"][:, 0, 0, 0, 0].int().tolist()


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def loader_of(folder: Path, rank: int, workers: int, **options: Any) -> tuple[Any, BucketSampler]:
    given = {"batch_size": 2, "drop_last": False, "stateful": False} | options
    return build_video_multiresolution_dataloader(
        cache_dir=folder, dp_rank=rank, dp_world_size=WORLD, num_workers=workers, **given
    )


@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_have_equal_shapes_at_each_step(folder: Path, drop_last: bool) -> None:
    shapes, seen = list[list[Any]](), Counter[int]()
    for rank in range(WORLD):
        loader, sampler = loader_of(folder, rank, 0, drop_last=drop_last, batch_size=1 + drop_last)
        batches = list(loader)
        assert len(batches) == len(loader) == len(sampler)
        shapes.append([tuple(batch["video_latents"].shape) for batch in batches])
        seen.update(number for batch in batches for number in numbers(batch))
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    if not drop_last:
        assert seen.keys() == set(range(COUNT))
        assert max(seen.values()) <= 2  # buckets are filled up, so some come twice


def test_an_epoch_has_its_own_order(folder: Path) -> None:
    loader, sampler = loader_of(folder, 0, 0)
    first, again = [list(map(numbers, loader)) for _ in range(2)]
    sampler.set_epoch(1)
    second = list(map(numbers, loader))
    assert first == again != second and sorted(first) != sorted(second)
    plain, _ = loader_of(folder, 0, 0, shuffle=False)
    found = [n for batch in map(numbers, plain) for n in batch]
    assert found[:2] == [5, 33]  # of the smallest size, as in AutoModel; every fourth is rank 0's


def make_bucket(folder: Path, rank: int, workers: int) -> Any:
    return loader_of(folder, rank, workers)[0]


def make_stateful(folder: Path, rank: int, workers: int) -> Any:
    pytest.importorskip("torchdata", reason="the extra `trainers` is not installed")
    return loader_of(folder, rank, workers, stateful=True)[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [make_bucket, make_stateful])
def test_a_stopped_loader_goes_on_exactly(
    folder: Path, make: Callable[..., Any], workers: int
) -> None:
    """On each of four ranks; without workers stopped twice in an epoch, and at its end."""
    stops: list[int | None] = [3, None] if workers else [3, 2, None]
    for rank in range(WORLD):
        whole = [numbers(batch) for batch in make_bucket(folder, rank, 0)]
        assert len(whole) > 6
        found, state = list[list[int]](), None
        for wanted in stops:
            loader = make(folder, rank, workers)
            if state is not None:
                loader.load_state_dict(state)
            for count, batch in enumerate(loader, start=1):
                found.append(numbers(batch))
                if count == wanted:
                    break
            state = stored(loader.state_dict())
        assert found == whole
        ended = make(folder, rank, 2 - workers)  # a finished pass is followed by a whole one
        ended.load_state_dict(state)
        assert list(map(numbers, ended)) == whole


def test_after_the_end_of_an_epoch_comes_the_next(folder: Path) -> None:
    """A trainer may save with the last batch or after it, and call set_epoch before it loads."""
    for early, inside in ((False, False), (True, False), (False, True), (True, True)):
        loader, sampler = loader_of(folder, 0, 0)
        for _ in loader:
            state = loader.state_dict()
        assert state["batches_yielded"] == len(loader)
        if not inside:
            state = loader.state_dict()
        sampler.set_epoch(1)
        second = list(map(numbers, loader))
        again, sampler = loader_of(folder, 0, 0)
        if early:
            sampler.set_epoch(1)
        again.load_state_dict(state)
        if not early:
            sampler.set_epoch(0)  # of a trainer that saved before it counted the epoch
            assert not list(again)
        sampler.set_epoch(1)
        assert list(map(numbers, again)) == second


def test_the_state_goes_over_an_epoch(folder: Path) -> None:
    loader, sampler = loader_of(folder, 1, 0)
    every = list[list[int]]()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            every.append(numbers(batch))
            if (epoch, len(every)) == (1, len(loader) + 3):
                state = loader.state_dict()
    again, sampler = loader_of(folder, 1, 0)
    again.load_state_dict(state)
    sampler.set_epoch(state["epoch"])  # as trainers call it before each epoch
    assert state["epoch"] == 1 and state["batches_yielded"] == 3
    assert list(map(numbers, again)) == every[len(loader) + 3 :]
    other, _ = loader_of(folder, 1, 0, batch_size=3)
    with pytest.raises(ValueError, match=r"another order of samples \(batch_size=2 -> 3\)"):
        other.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"keys \['epoch'\], and was not saved by dit\.data\.export"
    ):
        again.load_state_dict({"epoch": 1})


def test_a_state_belongs_to_its_data(folder: Path, shards, tmp_path: Path) -> None:
    """Other samples of the same sizes would repeat some and leave out others, unnoticed."""
    parts = [shards.good(index) for index in range(COUNT)]
    same = shards.write(tmp_path / "same", parts, per_shard=7)
    parts[0], parts[7] = parts[7], parts[0]
    other = shards.write(tmp_path / "other", parts)
    loader, _ = loader_of(folder, 0, 0)
    next(iter(loader))
    loader_of(same, 0, 0)[0].load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"another order of samples \(dataset='\w+' -> '\w+'\)"):
        loader_of(other, 0, 0)[0].load_state_dict(loader.state_dict())


def test_dynamic_batches_have_about_as_many_pixels(folder: Path) -> None:
    samples = ShardSamples(folder)
    sampler = BucketSampler(samples, batch_size=4, base_resolution=(32, 32), drop_last=False)
    for batch in sampler:
        (bucket,) = {samples.buckets[samples.bucket_of[index]] for index in batch}
        size = max(1, int(4 / (bucket.width * bucket.height / 1024)))
        assert sampler.size_of(bucket) == size >= len(batch)
        assert dynamic_batch_size(bucket, base=4, resolution=(32, 32)) == size
    assert len({sampler.size_of(bucket) for bucket in samples.buckets}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("stateful", [False, True])
def test_a_stream_gives_every_sample_and_goes_on(folder: Path, stateful: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata", reason="the extra `trainers` is not installed")

    def stream(rank: int) -> Any:
        made = SampleStream(folder, dp_rank=rank, dp_world_size=WORLD)
        made.set_epoch(5)
        return stateful_class()(made, batch_size=None, num_workers=2) if stateful else made

    seen = Counter[str]()
    for rank in range(WORLD):
        whole = [sample["key"] for sample in stream(rank)]
        assert len(whole) == -(-COUNT // WORLD)
        seen.update(whole)
        stopped, again = stream(rank), stream(rank)
        begun = [sample["key"] for _, sample in zip(range(5), stopped, strict=False)]
        again.load_state_dict(stopped.state_dict())
        assert begun + [sample["key"] for sample in again] == whole
    assert len(seen) == COUNT and seen.total() == 48
    # Trainers set the next epoch before torchdata loads the state of the one that has ended.
    again = stream(0)
    whole = [sample["key"] for sample in again]
    following = stream(0)
    following.load_state_dict(again.state_dict())
    (following.dataset if stateful else following).set_epoch(6)
    assert [sample["key"] for sample in following] != whole
    assert len(list(following)) == len(whole)


def test_workers_that_persist_have_the_next_epoch(folder: Path) -> None:
    stream = SampleStream(folder)
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    epochs = list[list[str]]()
    for epoch in range(2):
        stream.set_epoch(epoch)
        epochs.append([sample["key"] for sample in loader])
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


def test_without_torchdata_the_error_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("torchdata"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"megatron-dit\[trainers\].*stateful=False"):
        loader_of(folder, 0, 0, stateful=True)
    assert isinstance(loader_of(folder, 0, 0)[0], BucketLoader)


def test_clips_of_other_lengths_do_not_share_a_batch(shards, tmp_path: Path) -> None:
    latents = [torch.zeros(2, 1 + index % 2, 4, 4) for index in range(6)]
    parts = [shards.ours(latent, torch.zeros(1, shards.width)) for latent in latents]
    loader, _ = build_video_multiresolution_dataloader(
        cache_dir=shards.write(tmp_path / "data", parts),
        batch_size=3,
        num_workers=0,
        stateful=False,
    )
    shapes = [tuple(batch["video_latents"].shape) for batch in loader]
    assert sorted(shapes) == [(3, 2, 1, 4, 4), (3, 2, 2, 4, 4)]
