"""Adapters of networks with sound: which layers get one, by key and by dataset, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dit.config import LoraConfig, LoraStreams, Problems
from dit.convert.lora import export_lora, open_adapters
from dit.data.preflight import CARD
from dit.lora.files import DIFFUSERS_FILE, read_lora
from dit.train.checkpoint.adapters import of_heard_streams
from tests.packs import run_config
from tests.resuming import built, saved
from tests.sounding import FLOW, sound_model
from tests.unit.data.conftest import Shards
from tests.unit.data.test_sound_in_packs import heard

SHARDS = Shards()
SILENT, SOUNDING = {"processor": {}}, {"processor": {}, "sound_latent": {"channels": 6}}


def dataset(root: Path, *, sounds: int, card: dict | None) -> Path:
    """Twelve samples in three shards, of which `sounds` at the end have a sound."""
    plain = [SHARDS.good(number) for number in range(12)]
    parts = [heard(one, 1) if n >= 12 - sounds else one for n, one in enumerate(plain)]
    place = SHARDS.write(root, parts, per_shard=5)
    if card is not None:
        (place / CARD).write_text(json.dumps(card))
    return place


def started(root: Path | None, streams: LoraStreams = LoraStreams.BOTH) -> tuple[str, list[str]]:
    """The streams of a new run on a dataset, and what its log says."""
    data = SHARDS.config(root) if root else SHARDS.config(mock=True)
    config = replace(data, model=sound_model(), lora=LoraConfig(rank=2, streams=streams))
    said: list[str] = []
    return of_heard_streams(config, said.append).lora.streams, said


@pytest.mark.parametrize(
    ("sounds", "card", "streams"),
    [
        (0, None, "video"),
        (0, SOUNDING, "video"),
        (1, None, "both"),
        (1, SOUNDING, "both"),
        (1, SILENT, "video"),  # of data_prep, which says that no sound was packed
        (1, {"latent": {}}, "both"),  # of another tool
    ],
)
def test_a_dataset_without_sound_puts_no_adapter_on_its_layers(
    tmp_path, sounds: int, card: dict | None, streams: str
) -> None:
    found, said = started(dataset(tmp_path, sounds=sounds, card=card))
    assert found == streams
    assert [line.partition(":")[0] for line in said] == ["no sample has a sound"] * (
        streams == "video"
    )


def test_what_may_have_sound_keeps_its_adapters(tmp_path) -> None:
    """Mock data, a dataset that is elsewhere, and a damaged shard, which reading will name."""
    assert started(None)[0] == "both" and started(tmp_path / "elsewhere")[0] == "both"
    place = dataset(tmp_path / "damaged", sounds=0, card=None)
    (place / "train/shard-000001.tar").write_bytes(b"no tar" * 512)
    assert started(place)[0] == "both"


def test_adapters_of_the_sound_alone_need_a_sound(tmp_path) -> None:
    place = dataset(tmp_path, sounds=0, card=SILENT)
    with pytest.raises(Problems, match=r"lora\.streams=sound: no sample .*streams=video"):
        started(place, LoraStreams.SOUND)
    assert started(place, LoraStreams.VIDEO) == ("video", [])


@pytest.mark.parametrize("streams", LoraStreams)
def test_exports_hold_the_chosen_streams_alone(groups, tmp_path, streams) -> None:
    lora = LoraConfig(rank=2, streams=streams)
    config = run_config(model=sound_model(), lora=lora, objective=FLOW)
    place = saved(tmp_path / "run", built(config, groups), config)
    export_lora(place, tmp_path / "file")
    with safe_open(tmp_path / "file" / DIFFUSERS_FILE, "pt") as file:
        keys = [*file.keys()]
    others = {"both": None, "video": "sound", "sound": ".attention."}[streams]
    assert keys and all(others is None or others not in key for key in keys)
    read, stored = read_lora(tmp_path / "file", config.model), open_adapters(place).factors
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[n].product(), one.product()) for n, one in stored.items())
    assert "lora.init_from=FOLDER" in (tmp_path / "file/README.md").read_text()
