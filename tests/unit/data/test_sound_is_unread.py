"""Shards whose samples have sound, too: no network asks for it, and packs are as without it."""

from __future__ import annotations

import safetensors.torch
import torch

from dit.codecs.sound.sound_part import PART
from dit.data.energon.shard_reader import read_head
from dit.data.tar_reader import OpenShards, SampleLocation, is_sound
from dit.pack_wire import flatten_pack
from tests.unit.data.conftest import built


def with_sound(parts: dict[str, bytes], number: int) -> dict[str, bytes]:
    """A sample with its sound: every third has none, some are long and some are damaged."""
    if number % 3 == 0:
        return parts
    sound = torch.full((16, 4000 if number % 3 == 1 else 3), float(number))
    payload = safetensors.torch.save({"latent": sound}) if number % 7 else b"no tensors"
    return parts | {PART: payload}


def packs_of(shards, root, opened) -> list[tuple[object, torch.Tensor]]:
    """Keys and captions, and all tensors as one row, of the next packs."""
    loader = opened(built(shards.config(root), rank=0, world_size=1))
    packs = [pack for _, pack in zip(range(30), loader, strict=False)]
    return [((pack.keys, pack.captions), flatten_pack(pack)[1]) for pack in packs]


def test_packs_are_the_same_to_the_bit(shards, tmp_path, opened) -> None:
    plain = [shards.good(number) for number in range(60)]
    heard = [with_sound(parts, number) for number, parts in enumerate(plain)]
    roots = shards.write(tmp_path / "plain", plain), shards.write(tmp_path / "heard", heard)
    without, beside = (packs_of(shards, root, opened) for root in roots)
    assert len(without) == 30
    for (names, row), (others, other_row) in zip(without, beside, strict=True):
        assert names == others and torch.equal(row, other_row)


def test_its_bytes_are_not_kept(shards, tmp_path) -> None:
    root = shards.write(tmp_path, [with_sound(shards.good(1), 1)])
    opened = OpenShards()
    path = str(root / "train/shard-000000.tar")
    start, size = opened.span(path, 0)
    place = SampleLocation(shards=opened, path=path, start=start, size=size)
    assert size > 16 * 4000 * 4
    _, names, parts = read_head(place)
    assert set(parts) == set(place.parts()) == {"safetensors", "json"}
    assert [name.partition(".")[2] for name in names] == ["safetensors", "json"]
    assert is_sound(PART) and not is_sound("safetensors")
    opened.close()
