"""The fixed list of validation packs."""

from itertools import chain, islice

import pytest
import torch

from dit.config import BlendEntry
from dit.data import DataError, build_train_loader, build_val_loader, build_val_packs


@pytest.fixture(scope="module")
def root(tmp_path_factory, shards):
    root = tmp_path_factory.mktemp("validation")
    shards.good_set(root, 80)
    shards.good_set(root, 45, first=700, split="val")
    return root


def keys_of(packs):
    return [pack.keys for pack in packs]


def test_every_sample_once_and_always_the_same(shards, root, opened):
    """Packing and push-back over a finite stream through Energon lose and repeat nothing."""
    loader = opened(build_val_loader(shards.config(root), rank=0, world_size=1))
    first = keys_of(loader)
    assert sorted(chain(*first)) == [f"{i:06d}" for i in range(700, 745)]
    assert keys_of(loader) == first  # iterated again
    shards.take(loader, 3)
    assert keys_of(loader) == first  # and after a pass that was broken off
    other = opened(build_val_loader(shards.config(root, num_workers=2), rank=0, world_size=1))
    assert keys_of(other) == first


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_list_out(shards, root, opened, world_size):
    whole = keys_of(opened(build_val_loader(shards.config(root), rank=0, world_size=1)))
    for rank in range(world_size):
        loader = build_val_loader(shards.config(root), rank=rank, world_size=world_size)
        assert keys_of(opened(loader)) == whole[rank::world_size]


def test_packs_by_index_wrap_around_at_the_end(shards, root, opened):
    config = shards.config(root)
    whole = list(opened(build_val_loader(config, rank=0, world_size=1)))
    count = len(whole)
    indices = [3, 0, 3, count - 1, count, 2 * count + 1]
    found = build_val_packs(config, indices=indices).packs
    assert keys_of(found) == [whole[i % count].keys for i in indices]
    assert torch.equal(found[0].latent_TC, whole[3].latent_TC)
    assert build_val_packs(config, indices=[]).packs == []


def test_training_split_read_apart_leaves_training_alone(shards, root, opened):
    config = shards.config(root, use_train_split_for_val=True)
    alone = opened(build_train_loader(config, rank=0, world_size=1))
    expected = shards.take(alone, 20)
    disturbed = opened(build_train_loader(config, rank=0, world_size=1))
    given = []
    for _ in range(4):
        given += shards.take(disturbed, 5)
        packs = build_val_packs(config, indices=range(6)).packs
        assert all(int(key) < 80 for pack in packs for key in pack.keys)
    assert given == expected


def test_no_split_for_validation_says_what_to_do(shards, tmp_path):
    shards.good_set(tmp_path, 20)
    with pytest.raises(DataError) as caught:
        build_val_loader(shards.config(tmp_path), rank=0, world_size=1)
    text = str(caught.value)
    assert str(tmp_path) in text and "`val`" in text
    assert "dataset.use_train_split_for_val=true" in text
    assert "--split" in text


def test_a_blend_is_validated_part_after_part(shards, root, tmp_path, opened):
    shards.good_set(tmp_path / "b", 10)
    shards.good_set(tmp_path / "b", 12, first=900, split="val")
    blend = (BlendEntry(path=str(root), weight=9.0), BlendEntry(path=str(tmp_path / "b")))
    loader = opened(build_val_loader(shards.config(blend=blend), rank=0, world_size=1))
    keys = list(chain(*keys_of(loader)))
    assert sorted(key.split("/")[1] for key in keys) == [
        f"{i:06d}" for i in (*range(700, 745), *range(900, 912))
    ]


def test_mock_validation_is_fixed_and_not_the_training_data(shards, opened):
    config = shards.config(mock=True)
    first, again = (build_val_packs(config, indices=[0, 2]).packs for _ in range(2))
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left.latent_TC, right.latent_TC)
    train = opened(build_train_loader(config, rank=0, world_size=1))
    seen = {tuple(row.tolist()) for pack in islice(train, 30) for row in pack.latent_TC}
    assert not seen & {tuple(row.tolist()) for row in first[0].latent_TC[first[0].is_real_T]}
