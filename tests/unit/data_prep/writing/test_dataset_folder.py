"""A packed folder: what is in it, that it is whole, and that others can read it."""

import json
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch
import webdataset
import yaml
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors import Sample

from data_prep.planning.splits import SplitFractions
from data_prep.refusals import PrepError
from data_prep.sources.digits import Digits
from data_prep.writing.dataset_folder import check_source_outside, prepare_folder
from data_prep.writing.tar_shards import ShardSeries, sample_parts
from dit.codecs import text, vae
from dit.codecs.text import ByteTable


def test_every_sample_once_with_all_that_the_format_asks(
    packed: Path, read_samples, options
) -> None:
    samples, source = read_samples(packed), Digits(num_samples=150)
    assert sorted(samples) == sorted(entry.source for entry in source.entries)
    card = json.loads((packed / "dataset_card.json").read_text())
    codec, encoder = vae.codec_of_card(card), text.text_encoder_of_card(card)
    for entry in source.entries:
        sample, clip = samples[entry.source], source.read(entry)
        assert sample["key"] == entry.key and "." not in entry.key
        assert sample["caption"] == clip.caption and sample["format_version"] == 1
        assert torch.equal(sample["latent"], codec.encode(clip.video_CFHW))
        assert sample["latent"].dtype == torch.float16 and sample["latent"].shape == (4, 1, 4, 4)
        assert torch.equal(sample["text"], encoder.encode(clip.caption))
        assert sample["crc32"] == {"safetensors": f"{zlib.crc32(sample['payload']):08x}"}
        assert (sample["height"], sample["width"], sample["num_frames"]) == (8, 8, 1)
        assert (sample["original_height"], sample["original_width"]) == (8, 8)
        assert sample["fps"] is None
        assert (sample["processor"], sample["text_encoder"]) == ("pixel", "bytes")
        assert sample["text_encoder_revision"] == encoder.revision
        assert sample["latent_mean"] == card["latent"]["mean"]
        assert sample["latent_std"] == card["latent"]["std"]
        assert sample["shard"].parent.name == options().split.split_of(entry.key)


def test_the_card_counts_what_is_there(packed: Path, read_samples) -> None:
    card = json.loads((packed / "dataset_card.json").read_text())
    samples = Counter(s["shard"].parent.name for s in read_samples(packed).values())
    assert card["splits"] == {
        split: {"samples": count, "shards": len(list((packed / split).glob("*.tar")))}
        for split, count in samples.items()
    }
    assert set(samples) == {"train", "val", "test"} and card["license"] is None
    assert card["latent"]["channels"] == 4 and card["latent"]["dtype"] == "float16"
    assert card["sources"] == ["sklearn.datasets.load_digits"]
    assert card["settings"] == {"some": "setting"} and card["refused"] == {}


def test_the_null_text_is_the_empty_string(packed: Path) -> None:
    null = safetensors.torch.load_file(packed / "null_text.safetensors")
    assert set(null) == {"text"} and null["text"].shape == (1, 16)
    assert torch.equal(null["text"], ByteTable(width=16).encode(""))


def test_index_and_metadata_are_those_of_energon_prepare(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    shutil.rmtree(copy / ".nv-meta")
    for index in copy.rglob("*.idx"):
        index.unlink()
    energon = [str(Path(sys.executable).with_name("energon")), "prepare", "--non-interactive"]
    energon += ["--no-progress", "--num-workers", "1", "--sample-type", "CrudeWebdataset"]
    for split in ("train", "val", "test"):
        energon += ["--split-parts", f"{split}:{split}/.*"]
    subprocess.run([*energon, str(copy)], check=True, capture_output=True, timeout=120)
    indices = sorted(path.relative_to(packed) for path in packed.rglob("*.tar.idx"))
    assert len(indices) >= 6  # several shards, so that their names are collapsed to patterns
    assert indices == sorted(path.relative_to(copy) for path in copy.rglob("*.tar.idx"))
    for index in indices:
        assert (packed / index).read_bytes() == (copy / index).read_bytes(), index
    for name in (".info.json", "split.yaml", "dataset.yaml"):
        assert (packed / ".nv-meta" / name).read_text() == (copy / ".nv-meta" / name).read_text()


@edataclass
class Cooked(Sample):
    """Sample key and source."""

    key: str
    source: str


@stateless
def cook(sample: dict) -> Cooked:
    payload = safetensors.torch.load(sample["safetensors"])
    assert payload["latent"].shape == (4, 1, 4, 4)
    source = json.loads(sample["json"])["source"]
    return Cooked(**basic_sample_keys(sample), key=sample["__key__"], source=source)


class Reader(DefaultTaskEncoder):
    """Cooks and does no more."""

    decoder = None
    cookers = (Cooker(cook),)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_energon_reads_every_sample_of_a_split_once(packed: Path, split: str, options) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        packed,
        worker_config=config,
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
        split_part=split,
        task_encoder=Reader(),
    )
    found = Counter(sample.source for sample in get_loader(dataset))
    wanted = {
        entry.source
        for entry in Digits(num_samples=150).entries
        if options().split.split_of(entry.key) == split
    }
    assert wanted and found == Counter(wanted)


def test_plain_webdataset_reads_every_sample_once(packed: Path) -> None:
    shards = sorted(str(path) for path in (packed / "train").glob("*.tar"))
    patterns = yaml.safe_load((packed / ".nv-meta/split.yaml").read_text())["split_parts"]["train"]
    assert patterns == [f"train/shard-{{000000..{len(shards) - 1:06d}}}.tar"]
    for urls in (shards, str(packed / patterns[0])):
        samples = list(webdataset.WebDataset(urls, shardshuffle=False))
        keys = {sample["__key__"] for sample in samples}
        card = json.loads((packed / "dataset_card.json").read_text())
        assert len(samples) == len(keys) == card["splits"]["train"]["samples"]
        assert all({"safetensors", "json"} <= set(sample) for sample in samples)


def test_packing_again_gives_the_same_bytes(
    packed: Path, tmp_path: Path, pack_digits, content_of
) -> None:
    pack_digits(tmp_path / "again")
    assert content_of(tmp_path / "again") == content_of(packed)


def test_shards_hold_at_most_what_was_asked(packed: Path, tmp_path: Path, pack_digits) -> None:
    counts = json.loads((packed / ".nv-meta/.info.json").read_text())["shard_counts"]
    assert list(counts) == sorted(counts) and max(counts.values()) == 20
    pack_digits(tmp_path / "small", max_shard_bytes=50_000, shard_size=1000)
    sizes = [path.stat().st_size for path in (tmp_path / "small").rglob("*.tar")]
    assert len(sizes) > 3 and max(sizes) <= 50_000 + 10_240  # a tar ends in a whole record


def test_a_sample_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    with ShardSeries(tmp_path / "train", max_samples=10, max_bytes=2000) as series:
        for index in range(3):
            parts = sample_parts({"latent": torch.zeros(1, 1, 40, 40)}, {"index": index})
            series.write(f"key-{index}", parts)
    assert series.counts == {f"shard-{index:06d}.tar": 1 for index in range(3)}


def test_a_finished_folder_stays_as_it_is(
    packed: Path, tmp_path: Path, pack_digits, content_of
) -> None:
    shutil.copytree(packed, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tar")}
    assert pack_digits(tmp_path / "out").samples.total() == 150
    assert content_of(tmp_path / "out") == content_of(packed)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tar")}


def test_a_folder_of_other_options_or_of_others_is_never_touched(
    packed: Path, tmp_path: Path, pack_digits, content_of
) -> None:
    shutil.copytree(packed, tmp_path / "out")
    with pytest.raises(PrepError, match=r"is not empty.*shard_size: 20 -> 30.*--overwrite"):
        pack_digits(tmp_path / "out", shard_size=30)
    assert content_of(tmp_path / "out") == content_of(packed)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.md").write_text("mine")
    with pytest.raises(PrepError, match=r"is not empty.*notes.md.*give another folder"):
        pack_digits(tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["notes.md"]


@pytest.mark.parametrize("stranger", ["notes.md", "train/photo.jpg", "other/x", "train/shard.tar"])
def test_overwrite_removes_nothing_where_others_have_files(
    stranger: str, tmp_path: Path, pack_digits, content_of
) -> None:
    pack_digits(tmp_path)
    (tmp_path / stranger).parent.mkdir(exist_ok=True)
    (tmp_path / stranger).touch()
    before = content_of(tmp_path)
    with pytest.raises(PrepError, match=f"holds {stranger.split('/')[0]}.*removes nothing"):
        prepare_folder(tmp_path, overwrite=True)
    assert content_of(tmp_path) == before


def test_overwrite_leaves_nothing_of_a_larger_dataset(
    packed: Path, tmp_path: Path, pack_digits
) -> None:
    shutil.copytree(packed, tmp_path / "out")
    fewer = Digits(num_samples=20)
    pack_digits(tmp_path / "out", fewer, overwrite=True, split=SplitFractions.parse("1,0,0"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        ".ledger", ".nv-meta", "README.md", "dataset_card.json", "null_text.safetensors",
        "plan.jsonl", "refused.jsonl", "samples", "train",
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "out/train").glob("*.tar")] == ["shard-000000.tar"]


def test_options_that_cannot_be_are_errors(options) -> None:
    for change, message in (
        ({"shard_size": 0}, "--shard_size 0 must be at least 1"),
        ({"max_shard_bytes": 0}, "--max_shard_bytes 0"),
        ({"max_bad_fraction": 1.5}, "--max_bad_fraction 1.5"),
    ):
        with pytest.raises(PrepError, match=message):
            options(**change)


@pytest.mark.parametrize(
    "theirs", ["512x512/a.png", "combined_parquet_dataset/mine.parquet", "dfm_shards/a.tar"]
)
def test_overwrite_leaves_folders_that_are_only_named_as_ours(theirs: str, tmp_path: Path) -> None:
    (tmp_path / theirs).parent.mkdir()
    (tmp_path / theirs).touch()
    with pytest.raises(PrepError, match="which no packing wrote"):
        prepare_folder(tmp_path, overwrite=True)
    assert (tmp_path / theirs).exists()


def test_a_removal_that_was_killed_goes_on(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "out")
    (tmp_path / "out/train").rename(tmp_path / "out/train.tmp")
    prepare_folder(tmp_path / "out", overwrite=True)
    assert not list((tmp_path / "out").iterdir())


def test_what_is_read_does_not_lie_in_the_output_folder(tmp_path: Path) -> None:
    (tmp_path / "512x512").mkdir()
    with pytest.raises(PrepError, match="give another output folder"):
        check_source_outside(tmp_path, source=tmp_path / "512x512", option="--image_dir")
    check_source_outside(tmp_path / "out", source=tmp_path, option="--image_dir")
