"""Batches for other trainers hold what AutoModel's own code makes of a cache that we write.

They are the same from our shards and from the cache.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from data_prep.formats.export import export
from data_prep.packing import PackOptions, pack_dataset
from data_prep.planning.splits import ALL_IN_TRAIN
from data_prep.refusals import PrepError
from data_prep.sources.digits import Digits, MovingDigits
from data_prep.writing.tar_shards import sample_parts
from dit.codecs.text import ByteTable
from dit.codecs.vae import Pixel
from dit.data import DataError
from dit.data.export import (
    CacheSamples,
    ShardSamples,
    TextToImageDataloaderConfig,
    TextToVideoDataloaderConfig,
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from dit.token_ids import TOKEN_IDS


def _packed(folder: Path, source: Any, *, moving: bool) -> Path:
    options = PackOptions(
        split=ALL_IN_TRAIN, shard_size=7, max_shard_bytes=2**30, max_bad_fraction=0
    )
    codec = Pixel.of(block=2, colours=1, image_conditioning=moving)
    text = ByteTable(width=8, pooled=not moving)
    pack_dataset(source, folder, codec=codec, text=text, options=options, settings={})
    export(folder, form="meta", shard_size=100)  # the cache lies beside the shards
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _packed(tmp_path_factory.mktemp("p") / "digits", Digits(num_samples=9), moving=False)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _packed(
        tmp_path_factory.mktemp("v") / "moving", MovingDigits(num_samples=3), moving=True
    )


def cached(folder: Path) -> list[dict[str, Any]]:
    """The files of an AutoModel cache, each with its row of the index."""
    index = json.loads((folder / "metadata.json").read_text())
    rows = [row for name in index["shards"] for row in json.loads((folder / name).read_text())]
    files = (torch.load(row["cache_file"], weights_only=True) for row in rows)
    return [one | row for one, row in zip(files, rows, strict=True)]


def cache_alone(folder: Path, target: Path) -> Path:
    """The cache without the shards beside it, in another place than its index says."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".nv-meta", "train"))
    return target


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_videos_are_those_of_a_cache(videos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 3, "stateful": False, "drop_last": False}
    loader, _ = build_video_multiresolution_dataloader(cache_dir=videos, num_workers=0, **options)
    cache = cache_alone(videos, tmp_path / "cache")
    theirs, _ = build_video_multiresolution_dataloader(cache_dir=cache, num_workers=1, **options)
    assert all(map(same, loader, theirs)) and len(loader) == len(theirs)
    files = cached(videos)
    by_latent = {one["video_latents"].numpy().tobytes(): one for one in files}
    seen = 0
    for batch in loader:
        assert batch["data_type"] == "video"
        theirs = [by_latent[latent.numpy().tobytes()] for latent in batch["video_latents"]]
        seen += len(theirs)
        for name in ("video_latents", "text_embeddings", "first_frame_latent", "condition_latent"):
            expected = torch.cat([one[name] for one in theirs])  # as its collate function does
            assert torch.equal(batch[name], expected), name
        rows = batch["text_embeddings"].any(dim=-1).sum(dim=1)
        assert torch.equal(batch["text_mask"].sum(dim=1), rows) and rows.unique().numel() > 1
        assert batch["text_mask"].dtype == torch.long
    assert seen == len(ShardSamples(videos)) == len(files)


def test_pictures_are_those_of_a_cache(pictures: Path, tmp_path: Path) -> None:
    loader, _ = build_text_to_image_multiresolution_dataloader(
        cache_dir=pictures, batch_size=4, num_workers=0, stateful=False, drop_last=False
    )
    cache = CacheSamples(cache_alone(pictures, tmp_path / "cache"))
    shards = ShardSamples(pictures)
    assert shards[-1]["key"] == shards[len(shards) - 1]["key"]
    for ours, stored in zip(shards, cache, strict=False):
        assert torch.equal(ours["latent"], stored["latent"])
        rows = len(ours["text"])
        assert torch.equal(ours["text"], stored["text"][:rows]) and not stored["text"][rows:].any()
    theirs, seen = {one["image_path"]: one for one in cached(pictures)}, []
    for batch in loader:
        about = batch["metadata"]
        files = [theirs[path] for path in about["image_paths"]]
        seen += about["image_paths"]
        assert torch.equal(batch["image_latents"], torch.stack([one["latent"] for one in files]))
        pooled = torch.cat([one["pooled_prompt_embeds"] for one in files])
        assert torch.equal(batch["pooled_prompt_embeds"], pooled)
        rows = batch["text_embeddings"].shape[1]
        assert rows % 8 == 0
        text = torch.cat([one["prompt_embeds"] for one in files])
        longer = text.shape[1] - rows
        filled = torch.nn.functional.pad(batch["text_embeddings"], (0, 0, 0, longer))
        assert torch.equal(filled, text)
        assert about["prompts"] == [one["prompt"] for one in files]
        assert about["crop_resolution"].tolist() == [one["bucket_resolution"] for one in files]
        assert about["original_resolution"].tolist() == [
            one["original_resolution"] for one in files
        ]
        assert about["bucket_ids"] == [one["bucket_id"] for one in files]
        assert about["aspect_ratios"] == [one["aspect_ratio"] for one in files]
        assert about["crop_offset"].shape == (len(files), 2) and batch["data_type"] == "image"
    assert sorted(seen) == sorted(theirs)


def test_what_cannot_be_given_is_an_error_with_a_reason(videos: Path, shards, tmp_path) -> None:
    calls: list[tuple[dict[str, Any], str]] = [
        ({"text_length": 3}, "text_length=3 is too small"),
        ({"device": "cuda"}, "batches are made on the CPU"),
        ({"model_type": "wan"}, "packed with --processor pixel"),
        ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank=2 must lie in 0 to 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1000}, "give drop_last=False or a smaller batch_size"),
        ({"split": "val"}, "no samples in split `val`"),
    ]
    for options, words in calls:
        with pytest.raises(ValueError, match=words):
            build_video_multiresolution_dataloader(cache_dir=videos, stateful=False, **options)
    with pytest.raises(DataError, match="it is not a prepared dataset; pack media with"):
        ShardSamples(tmp_path)
    with pytest.raises(DataError, match="holds videos"):
        build_text_to_image_multiresolution_dataloader(cache_dir=videos)
    with pytest.raises(ValueError, match="token ids"):
        build_text_to_image_multiresolution_dataloader(cache_dir=videos, train_text_encoder=True)
    damaged = shards.good_set(tmp_path / "damaged", 5)
    shard = damaged / "train/shard-000000.tar"
    whole = bytearray(shard.read_bytes())
    head = 8 + int.from_bytes(whole[512:520], "little")  # behind the header of the tar
    whole[512 + head] ^= 1  # the first number of the first sample
    shard.write_bytes(whole)
    with pytest.raises(DataError, match=r"000000\.tar, sample 0: \.safetensors has crc.* inspect"):
        list(map(ShardSamples(damaged).__getitem__, range(5)))
    shard.write_bytes(whole[:2000])
    with pytest.raises(DataError, match="shard is cut short") as caught:
        ShardSamples(damaged)
    assert str(caught.value).count("data_prep inspect") == 1


def test_states_without_their_tokens_go_to_nobody(shards, tmp_path: Path) -> None:
    """A caption that a conditioner reads by tokens, which no other format has a place for."""
    parts = shards.good(0)
    tensors = safetensors.torch.load(parts["safetensors"]) | {TOKEN_IDS: torch.ones(3, 2)}
    sizes = ("width", "height", "original_width", "original_height", "num_frames")
    about = json.loads(parts["json"]) | {"source": "a", **dict.fromkeys(sizes, 1)}
    folder = shards.write(tmp_path, [sample_parts(tensors, about)])
    card = {"format_version": 1, "processor": {"name": "pixel"}, "text_encoder": {"width": 8}}
    (folder / "dataset_card.json").write_text(json.dumps(card))
    with pytest.raises(DataError, match=r"has `token_ids`, .* train on these shards with this"):
        ShardSamples(folder)
    with pytest.raises(PrepError, match=r"`token_ids`.* leave --output_format out"):
        export(folder, form="meta", shard_size=100)


def test_a_damaged_cache_is_named(videos: Path, tmp_path: Path) -> None:
    def cache(name: str) -> tuple[Path, Path]:
        folder = cache_alone(videos, tmp_path / name)
        return folder, next(folder.glob("*x*/*.meta"))

    folder, file = cache("bit")
    flipped = bytearray(file.read_bytes())
    latent = torch.load(file, weights_only=True)["video_latents"]
    flipped[flipped.index(latent.numpy().tobytes())] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(
        DataError, match=rf"{file.name}: \S+ in the file does not match its checksum"
    ):
        list(CacheSamples(folder))
    folder, file = cache("gone")
    file.unlink()
    with pytest.raises(
        DataError, match=rf"{file.name}: the index of the cache lists a file .* lacks; restore it"
    ):
        CacheSamples(folder)
    folder, file = cache("foreign")
    torch.save({"video_latents": CacheSamples}, file)
    with pytest.raises(DataError, match=rf"{file.name}: the file is damaged, or holds more than"):
        CacheSamples(folder)
    folder, _ = cache("index")
    (folder / "metadata_shard_0000.json").unlink()
    with pytest.raises(
        DataError, match=r"index of the cache, cannot be read .*shard_0000\.json: No such"
    ):
        CacheSamples(folder)


def test_a_configuration_of_automodel_takes_ours(videos: Path, pictures: Path) -> None:
    """Its recipe wants a dataclass with `build` as `_target_`, and reads the result by names."""
    keys = {"base_resolution", "drop_last", "shuffle", "dynamic_batch_size", "num_workers"}
    keys |= {"cache_dir", "pin_memory", "prefetch_factor"}
    for config, folder, own in (
        (TextToVideoDataloaderConfig, videos, {"model_type", "device"}),
        (TextToImageDataloaderConfig, pictures, {"train_text_encoder"}),
    ):
        assert is_dataclass(config) and keys | own <= {field.name for field in fields(config)}
        made = config(cache_dir=str(folder), num_workers=0, stateful=False, base_resolution=[8, 8])
        built = made.build(dp_rank=0, dp_world_size=2, batch_size=1)
        assert len(built.dataloader) == len(built.sampler) > 0


def test_a_mask_of_the_loss_comes_along(shards, tmp_path: Path) -> None:
    latent, text = torch.randn(2, 3, 4, 6), torch.randn(3, shards.width)
    mask = torch.rand(1, 3, 4, 6)
    parts = [shards.ours(latent, text, mask), shards.ours(latent, text)]
    folder = shards.write(tmp_path / "masked", parts)
    (folder / "dataset_card.json").write_text('{"text_encoder": null, "latent": [1]}')  # by others
    loader, _ = build_video_multiresolution_dataloader(
        cache_dir=folder,
        batch_size=2,
        num_workers=0,
        stateful=False,
        shuffle=False,
        drop_last=False,
    )
    masked, plain = loader
    assert torch.equal(masked["loss_mask"], mask[None]) and "loss_mask" not in plain


def test_samples_of_dfm_are_read_too(shards, tmp_path: Path) -> None:
    latent, text = torch.randn(2, 1, 4, 6), torch.randn(3, shards.width)
    folder = shards.write(tmp_path / "dfm", [shards.dfm(latent, text, caption="a fox")])
    (sample,) = [ShardSamples(folder)[0]]
    assert torch.equal(sample["latent"], latent) and torch.equal(sample["text"], text)
    assert (sample["caption"], sample["width"], sample["height"]) == ("a fox", 48, 32)
