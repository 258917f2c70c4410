"""The fixed list of validation packs."""

from itertools import chain, islice

import pytest
import torch

from dit.config import Balance, BlendEntry
from dit.data import DataError, Reject, build_train_loader, build_val_packs, validation_groups
from dit.sizing.flops import work_of_packs


@pytest.fixture(scope="module")
def root(tmp_path_factory, shards):
    root = tmp_path_factory.mktemp("validation")
    shards.good_set(root, 80)
    shards.good_set(root, 45, first=700, split="val")
    return root


def keys_of(packs):
    return [pack.keys for pack in packs]


def test_every_sample_once_and_always_the_same(shards, root):
    """Packing and push-back over a finite stream through Energon lose and repeat nothing."""
    first = keys_of(shards.one_pass(shards.config(root)).packs)
    assert sorted(chain(*first)) == [f"{i:06d}" for i in range(700, 745)]
    assert keys_of(shards.one_pass(shards.config(root, num_workers=2)).packs) == first


@pytest.mark.parametrize("balance", list(Balance))
def test_any_pack_is_read_by_its_key_and_without_the_others(shards, root, balance):
    """As by a rank that has not found out which samples share a pack, in any order."""
    config = shards.config(root, balance=balance, balance_packs=4)
    whole = shards.one_pass(config).packs
    work = work_of_packs(config.model, config.dataset)
    plan = validation_groups(config, work=work).plan(100)
    assert len(plan.groups) == len(whole)
    for index in (4, 1, 4):
        (pack,) = validation_groups(config, work=work).read(plan.of([index]))
        assert pack.keys == whole[index].keys
        assert torch.equal(pack.latent_TC, whole[index].latent_TC)
        assert torch.equal(pack.text_LE, whole[index].text_LE)


def test_a_sample_refused_when_its_pack_is_read_counts_once(shards, tmp_path):
    """NaN is seen when the sample is read; its pack lacks it, and so does every copy of it."""

    def large(latent):  # only its head is read before its pack is
        return shards.ours(torch.full((2, 1, 4, 4), float(latent)), torch.ones(1200, 8).bfloat16())

    samples = [large(number) for number in range(120)]
    samples[3] = large(float("nan"))
    shards.write(tmp_path, samples)
    config = shards.config(tmp_path, use_train_split_for_val=True)
    count = len(validation_groups(config).plan(100).groups)
    found = build_val_packs(config, indices=range(3 * count))
    assert found.counts.refused == {Reject.NOT_FINITE: 1}
    assert [sample.key for sample in found.refused] == ["000003"]
    once = [key for pack in found.packs[:count] for key in pack.keys]
    assert sorted(once) == [f"{i:06d}" for i in range(120) if i != 3]
    strict = shards.config(tmp_path, use_train_split_for_val=True, max_bad_fraction=0.0)
    with pytest.raises(DataError, match=r"max_bad_fraction=0.0(?s:.*)key 000003"):
        build_val_packs(strict, indices=range(count))


def test_packs_by_index_wrap_around_at_the_end(shards, root):
    config = shards.config(root)
    whole = shards.one_pass(config).packs
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
        validation_groups(shards.config(tmp_path))
    text = str(caught.value)
    assert str(tmp_path) in text and "`val`" in text
    assert "dataset.use_train_split_for_val=true" in text
    assert "--split" in text


def test_a_blend_is_validated_part_after_part(shards, root, tmp_path):
    shards.good_set(tmp_path / "b", 10)
    shards.good_set(tmp_path / "b", 12, first=900, split="val")
    blend = (BlendEntry(path=str(root), weight=9.0), BlendEntry(path=str(tmp_path / "b")))
    keys = list(chain(*keys_of(shards.one_pass(shards.config(blend=blend)).packs)))
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
