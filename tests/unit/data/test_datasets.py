"""Paths, folders and what lies beside the shards; every problem is found before reading."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from megatron.energon.epathlib import EPath

from dit.config import BlendEntry, DatasetConfig
from dit.data import DataError, build_train_loader, dataset_card, null_inputs
from dit.data.datasets import DatasetSplit, key_prefixes
from dit.models.registry import family_named
from tests.packs import run_config


def train_error(config, *, world_size=1):
    with pytest.raises(DataError) as caught:
        build_train_loader(config, rank=0, world_size=world_size)
    return str(caught.value)


def blend(*entries):
    """A metadataset of these datasets."""
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    return f"{head}    blend: [{', '.join(entries)}]\n"


def test_folders_of_a_blend_have_names_that_people_know():
    """A folder that comes twice has its own, as it is one dataset."""
    leaves = [DatasetSplit(path=EPath(path), split="train") for path in ("/a/img", "/b", "/a/img")]
    assert key_prefixes(tuple(leaves)) == {"/a/img": "img", "/b": "b"}
    leaves.append(DatasetSplit(path=EPath("/c/img"), split="train"))
    assert key_prefixes(tuple(leaves)) == {"/a/img": "img-2", "/b": "b", "/c/img": "img-3"}


def test_no_data_named():
    assert "dataset.path" in train_error(run_config(dataset=DatasetConfig()))


def test_missing_path(shards, tmp_path):
    text = train_error(shards.config(tmp_path / "typo"))
    assert "typo does not exist" in text
    assert "python -m data_prep" in text


def test_folder_that_is_not_prepared(shards, tmp_path):
    (tmp_path / "shard.tar").write_bytes(b"")
    text = train_error(shards.config(tmp_path))
    assert f"{tmp_path} has no .nv-meta" in text
    assert "python -m data_prep" in text
    assert f"energon prepare --sample-type CrudeWebdataset {tmp_path}" in text


@pytest.mark.parametrize("samples", [0, 20])
def test_empty_training_split(shards, tmp_path, samples):
    shards.good_set(tmp_path, samples, split="val")
    assert "has no samples in split `train`" in train_error(shards.config(tmp_path))


def test_shards_without_samples_are_an_empty_dataset(shards, tmp_path):
    shards.good_set(tmp_path, 5)
    info = tmp_path / ".nv-meta/.info.json"
    info.write_text(json.dumps({"shard_counts": {"train/shard-000000.tar": 0}}))
    assert "has no samples in split `train`" in train_error(shards.config(tmp_path))


def test_garbled_index(shards, tmp_path):
    shards.good_set(tmp_path, 5)
    (tmp_path / ".nv-meta/.info.json").write_text("{")
    assert ".nv-meta cannot be read" in train_error(shards.config(tmp_path))


def test_fewer_samples_than_readers(shards, tmp_path):
    shards.good_set(tmp_path, 7)
    text = train_error(shards.config(tmp_path, num_workers=4), world_size=2)
    assert "7 samples" in text
    assert "8 readers (2 data-parallel ranks x 4 workers)" in text
    assert "dataset.num_workers" in text


def test_as_many_samples_as_readers_suffice(shards, tmp_path, opened):
    shards.good_set(tmp_path, 2)
    config = shards.config(tmp_path, num_workers=2)
    shards.take(opened(build_train_loader(config, rank=0, world_size=1)), 4)


@pytest.mark.parametrize(
    "settings",
    [
        "__module__: subprocess\n__class__: Popen\nargs: [touch, RAN]\n",
        "__module__: megatron.energon\n__class__: CaptioningWebdataset\n",
        "__module__: megatron.energon\n__class__: CrudeWebdataset\npart_filter: os:system\n",
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
        "subset: {__module__: subprocess, __function__: run}\n",
        "just words",
    ],
)
def test_a_dataset_does_not_choose_the_code_that_runs(shards, tmp_path, settings):
    shards.good_set(tmp_path, 5)
    (tmp_path / ".nv-meta/dataset.yaml").write_text(settings.replace("RAN", f"{tmp_path}/ran"))
    assert "dataset.yaml" in train_error(shards.config(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_metadataset_does_not_choose_code_either(shards, tmp_path):
    shards.good_set(tmp_path / "a", 5)
    (tmp_path / "a/.nv-meta/dataset.yaml").write_text("__module__: subprocess\n__class__: Popen\n")
    outer, inner = tmp_path / "outer.yaml", tmp_path / "inner.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    outer.write_text(head + "    path: ./inner.yaml\n")
    inner.write_text(head.replace("MetadatasetV2", "exec") + "    path: ./a\n")
    assert "inner.yaml names the class megatron.energon.exec" in train_error(shards.config(outer))
    inner.write_text(head + "    path: ./a\n")
    assert "dataset.yaml names the class subprocess.Popen" in train_error(shards.config(outer))


def test_settings_that_a_metadataset_names_do_not_choose_code(shards, tmp_path):
    shards.good_set(tmp_path / "a", 5)
    (tmp_path / "a/.nv-meta/other.yaml").write_text("__module__: subprocess\n__class__: Popen\n")
    (tmp_path / "m.yaml").write_text(blend("{weight: 1, path: ./a, dataset_config: other.yaml}"))
    assert "other.yaml names the class subprocess.Popen" in train_error(
        shards.config(tmp_path / "m.yaml")
    )


@pytest.mark.parametrize("weight", ["0", "-1", "0.0"])
def test_a_weight_of_a_metadataset_is_above_0(shards, tmp_path, weight):
    shards.good_set(tmp_path / "a", 5)
    (tmp_path / "m.yaml").write_text(blend(f"{{weight: {weight}, path: ./a}}"))
    said = train_error(shards.config(tmp_path / "m.yaml"))
    assert f"m.yaml: weight of ./a is {weight}, but must be above 0" in said


@pytest.mark.parametrize(("part", "count"), [("5%", 3), ("1%", 0)])
def test_a_part_of_a_dataset_has_a_sample_for_each_reader(shards, tmp_path, part, count):
    """Energon would blend the others without it, on some ranks or on all."""
    shards.good_set(tmp_path / "a", 60)
    shards.good_set(tmp_path / "b", 60)
    few = f"{{weight: 1, path: ./a, subset: {{range: [0%, {part}]}}}}"
    (tmp_path / "m.yaml").write_text(blend(few, "{weight: 1, path: ./b}"))
    said = train_error(shards.config(tmp_path / "m.yaml", num_workers=2), world_size=2)
    assert f"/a gives {count} samples, fewer than the 4 readers" in said


def test_a_file_that_is_no_metadataset(shards, tmp_path):
    (tmp_path / "data.tar").write_bytes(b"")
    assert "is a file; give a folder" in train_error(shards.config(tmp_path / "data.tar"))


def test_a_metadataset_has_no_home_folders(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    (tmp_path / "m.yaml").write_text(head + "    path: ~/a\n")
    said = train_error(shards.config(tmp_path / "m.yaml"))
    assert "the path ~/a, and Energon does not expand ~; write /users/me/a" in said


def test_data_of_an_object_store_are_read(shards, tmp_path, monkeypatch, opened):
    shards.good_set(tmp_path / "store/set", 5)
    provider = {"type": "file", "options": {"base_path": str(tmp_path / "store")}}
    profiles = {"profiles": {"test-datasets": {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(profiles))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    config = shards.config("msc://test-datasets/set")
    shards.take(opened(build_train_loader(config, rank=0, world_size=1)), 4)


def test_a_metadataset_without_the_split(shards, tmp_path):
    shards.good_set(tmp_path / "a", 5)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  test:\n"
    (tmp_path / "m.yaml").write_text(head + "    path: ./a\n")
    assert "no samples in split `train`" in train_error(shards.config(tmp_path / "m.yaml"))


def null(root, rows, width=8):
    text = torch.full((rows, width), float(rows)).half()
    (root / "null_text.safetensors").write_bytes(safetensors.torch.save({"text": text}))


def test_card_and_null_text_come_from_the_dataset(shards, tmp_path):
    config = shards.config(shards.good_set(tmp_path, 5))
    assert dataset_card(config) is None
    assert torch.equal(null_inputs(config)["text"], torch.zeros(1, 8))
    (tmp_path / "dataset_card.json").write_text('{"format_version": 1}')
    null(tmp_path, 3)
    assert dataset_card(config) == {"format_version": 1}
    assert torch.equal(null_inputs(config)["text"], torch.full((3, 8), 3.0))


def test_null_text_of_another_width(shards, tmp_path):
    config = shards.config(shards.good_set(tmp_path, 5))
    null(tmp_path, 1, width=16)
    with pytest.raises(DataError, match=r"\[1, 16\], but model\.crossattn_emb_size=8"):
        null_inputs(config)


def test_null_texts_of_a_blend_must_agree(shards, tmp_path):
    roots = [shards.good_set(tmp_path / name, 5) for name in "ab"]
    config = shards.config(blend=tuple(BlendEntry(path=str(root)) for root in roots))
    null(roots[0], 2)
    null(roots[1], 2)
    assert len(null_inputs(config)["text"]) == 2
    null(roots[1], 3)
    with pytest.raises(DataError, match=r"of .*/b differs from that of .*/a in `text`; pack"):
        null_inputs(config)
    (roots[1] / "null_text.safetensors").unlink()
    with pytest.raises(DataError, match=r"\(.*/b has no such file, which means a zero vector\)"):
        null_inputs(config)


def test_samples_with_null_texts_of_their_own_blend_with_others(shards, tmp_path):
    """As edits of Qwen-Image-Edit, whose folder has no file of them, beside plain pictures."""
    roots = [shards.good_set(tmp_path / name, 5) for name in "ab"]
    config = shards.config(blend=tuple(BlendEntry(path=str(root)) for root in roots))
    family = family_named("qwen_image")
    edits = {"name": "custom", "crossattn_emb_size": 8, "reference_latents": 1}
    config = replace(config, model=family.config(**{**family.tiny["qwen_image"], **edits}))
    assert torch.equal(null_inputs(config)["text"], torch.zeros(1, 8))
    null(roots[1], 3)
    assert torch.equal(null_inputs(config)["text"], torch.full((3, 8), 3.0))


def test_a_folder_prepared_by_energon_itself_is_read(shards, tmp_path, opened):
    """DFM's layout and Energon's own command: nothing of ours but the reader."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    samples = [
        shards.dfm(torch.full((1, 2, 1, 4, 4), float(i)), torch.ones(1, 6, 8)) for i in range(30)
    ]
    shards.write(tmp_path, samples, per_shard=10)
    for path in [*tmp_path.glob(".nv-meta/*"), *tmp_path.glob("train/*.idx")]:
        path.unlink()
    BaseWebdatasetFactory.prepare_dataset(
        EPath(str(tmp_path)),
        [f"train/{path.name}" for path in sorted((tmp_path / "train").glob("*.tar"))],
        split_parts_patterns=[("train", "train/.*")],
        progress_fn=lambda items, length=None: items,
        tar_index_only=False,
        shuffle_seed=None,
        workers=1,
    )
    (tmp_path / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    loader = opened(build_train_loader(shards.config(tmp_path), rank=0, world_size=1))
    for _ in range(5):
        pack = next(loader)
        firsts = [pack.latent_TC[start, 0].item() for start in pack.starts[:-1]]
        assert firsts == [float(int(key)) for key in pack.keys]
        assert len(pack.text_LE) == 6 * len(pack.keys)
