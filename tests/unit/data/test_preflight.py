"""What shows before the first step: shards and indices that are missing, data of another model."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from dit.config import BlendEntry
from dit.data import DataError, check_data
from dit.sizing.passes import data_lines
from tests.tables import table

INDEX = "train/shard-000001.tar.idx"


@pytest.fixture
def root(shards, tmp_path):
    shards.good_set(tmp_path / "set", 30, per_shard=10)
    return shards.good_set(tmp_path / "set", 4, split="val", first=30)


def fault(config):
    with pytest.raises(DataError) as caught:
        check_data(config)
    return str(caught.value)


def test_sound_data_are_counted(shards, root):
    config = shards.config(root)
    assert str(check_data(config)) == "30 training samples in 3 shards, none missing"
    (shards_line, passes_line) = data_lines(config).splitlines()
    assert shards_line == "# shards        30 training samples in 3 shards, none missing"
    assert passes_line.startswith("# passes        10,000 steps see each of the 30 ")
    assert data_lines(shards.config(root / "typo")).endswith(
        f"{root / 'typo'} does not exist here\n"
    )
    assert data_lines(shards.config(mock=True)) == ""


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train/shard-000001.tar", "restore it, or list it under `exclude`"),
        (INDEX, "energon prepare --tar-index-only"),
        ("val/shard-000000.tar", "restore it"),
    ],
)
def test_missing_files(shards, root, name, remedy):
    (root / name).unlink()
    text = fault(shards.config(root))
    assert f"{root / name} is missing; " in text
    assert remedy in text


def test_a_shard_that_the_split_excludes_may_be_missing(shards, root):
    (root / "train/shard-000001.tar").unlink()
    split = root / ".nv-meta/split.yaml"
    parts = json.loads(split.read_text())
    split.write_text(json.dumps(parts | {"exclude": ["train/shard-000001.tar"]}))
    assert str(check_data(shards.config(root))) == "20 training samples in 2 shards, none missing"


def test_all_faults_are_named_at_once(shards, root):
    for number in range(3):
        (root / f"train/shard-00000{number}.tar").unlink()
    (root / "val/shard-000000.tar.idx").unlink()
    lines = fault(shards.config(root)).splitlines()
    assert "for 4 reasons" in lines[0]
    assert len(lines) == 5


def _numbers(root):
    index = (root / INDEX).read_bytes()
    return list(struct.unpack(f"<{len(index) // 8}Q", index))


INDICES = {
    "empty": (lambda n: [], "has 0 bytes"),
    "short": (lambda n: n[:-1], "lists 9 samples, but .nv-meta/.info.json says that the shard has"),
    "long": (lambda n: [*n, n[-1] + 512], "lists 11 samples"),
    "zeros": (lambda n: [0] * len(n), "number 1 is 0, after 0: its numbers do not ascend"),
    "backwards": (lambda n: n[::-1], "do not ascend"),
    "exchanged": (lambda n: [*n[:3], n[4], n[3], *n[5:]], "do not ascend"),
    "beyond": (lambda n: [*n[:3], 2**63, *n[4:]], "do not ascend"),
    "odd": (lambda n: [*n[:3], n[3] + 1, *n[4:]], "where no file of a tar begins"),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_damaged_index_is_named_with_the_remedy(shards, root, name):
    change, why = INDICES[name]
    numbers = change(_numbers(root))
    (root / INDEX).write_bytes(struct.pack(f"<{len(numbers)}Q", *numbers))
    text = fault(shards.config(root))
    assert f"{root / INDEX} " in text
    assert why in text
    assert "restore" in text


def test_an_index_of_half_a_number(shards, root):
    (root / INDEX).write_bytes((root / INDEX).read_bytes()[:-3])
    assert "85 bytes, not two or more 8-byte numbers" in fault(shards.config(root))


CARD = {
    "format_version": 1,
    "processor": {"name": "pixel"},
    "text_encoder": {"name": "bytes", "width": 8},
    "latent": {"channels": 2, "stride": 8, "temporal_stride": 4},
    "splits": {"train": {"samples": 30}, "val": {"samples": 4}},
    "sizes": [
        {"num_frames": 1, "height": 64, "width": 32, "samples": 30},
        {"num_frames": 5, "height": 32, "width": 32, "samples": 4},
    ],
}


def test_a_card_that_fits(shards, root):
    (root / "dataset_card.json").write_text(json.dumps(CARD))
    check_data(shards.config(root))
    (root / "dataset_card.json").write_text("{}")  # other tools write less
    check_data(shards.config(root))


@pytest.mark.parametrize(("encoder", "told"), [("bytes", True), ("cosmos", False)])
def test_texts_that_published_weights_do_not_read_are_named(shards, root, encoder, told):
    card = CARD | {"text_encoder": {"name": encoder, "width": 8}}
    (root / "dataset_card.json").write_text(json.dumps(card))
    config = shards.config(root)
    assert not check_data(config).notes  # from scratch
    config = replace(config, checkpoint=replace(config.checkpoint, load_hf="weights"))
    notes = check_data(config).notes
    assert [note.split(":")[0] for note in notes] == [
        "texts of the encoder bytes, and the published weights of dit_xl read those of cosmos"
    ] * told


@pytest.mark.parametrize(("change", "parts"), table(__file__, "cards"))
def test_a_card_of_other_data_than_the_model_is_for(shards, root, change, parts):
    (root / "dataset_card.json").write_text(json.dumps(CARD | change))
    config = shards.config(root, task_encoder_seq_length=32)
    text = fault(config)
    for part in [str(root / "dataset_card.json"), *parts]:
        assert part in text


def test_few_samples_that_do_not_fit_are_left_to_the_bound(shards, root):
    sizes = [{"num_frames": 1, "height": 72, "width": 64, "samples": 3}, CARD["sizes"][0]]
    (root / "dataset_card.json").write_text(json.dumps(CARD | {"sizes": sizes}))
    check_data(shards.config(root, max_bad_fraction=0.1))
    assert "3 of its 34 samples" in fault(shards.config(root, max_bad_fraction=0.05))


def test_every_part_of_a_blend_is_looked_at(shards, root, tmp_path):
    other = shards.good_set(tmp_path / "other", 10)
    (other / "train/shard-000000.tar.idx").unlink()
    blend = (BlendEntry(path=str(root)), BlendEntry(path=str(other)))
    assert str(other) in fault(shards.config(blend=blend, use_train_split_for_val=True))


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", "[" * 50_000, "null"])
def test_a_card_that_is_no_object(shards, root, text):
    (root / "dataset_card.json").write_bytes(text.encode("latin-1"))
    assert str(root / "dataset_card.json") in fault(shards.config(root))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"processor": {"name": "flux"}}, "(processor.name: wan, flux)"),
        ({"latent": {"std": [2.0, 1.0]}}, "(latent.std)"),
        ({"text_encoder": {"name": "t5"}}, "(text_encoder.name: words, t5)"),
        ({"processor": 3, "latent": {"std": [1.0, 1.0]}, "text_encoder": {}}, ""),
    ],
)
def test_a_dataset_that_was_made_otherwise_is_named(shards, root, tmp_path, other, said):
    card = {
        "processor": {"name": "wan"},
        "latent": {"std": [1.0, 1.0]},
        "text_encoder": {"name": "words"},
    }
    second = shards.good_set(tmp_path / "b", 30)
    (root / "dataset_card.json").write_text(json.dumps(card))
    (second / "dataset_card.json").write_text(json.dumps(other))
    blend = (BlendEntry(path=str(root)), BlendEntry(path=str(second)))
    config = shards.config(blend=blend)
    notes = check_data(replace(config, train=replace(config.train, eval_iters=0))).notes
    assert [note.partition(": one network")[0] for note in notes] == (
        [f"WARNING: {second} was not prepared as {root} {said}"] if said else []
    )


def test_validation_that_does_not_happen_needs_no_files(shards, root):
    (root / "val/shard-000000.tar").unlink()
    config = shards.config(root)
    check_data(replace(config, train=replace(config.train, eval_interval=0)))


def test_a_card_of_two_splits_is_one_reason(shards, root):
    (root / "dataset_card.json").write_text('{"text_encoder": {"width": 7}}')
    lines = fault(shards.config(root)).splitlines()
    assert lines[0] == "the data cannot be trained on:" and len(lines) == 2
