"""Damaged shards and unusable samples: counted, tolerated up to a bound, then an error; no hang."""

import json

import pytest
import torch

from dit.config import BlendEntry
from dit.data import DataError, Reject, build_train_loader, validation_groups

SAMPLES, PER_SHARD = 120, 30


def overwrite(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def truncate(root):
    shard = root / "train/shard-000001.tar"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)


def delete(root):
    (root / "train/shard-000001.tar").unlink()


def delete_index(root):
    (root / "train/shard-000001.tar.idx").unlink()


def overwrite_header(root):
    overwrite(root / "train/shard-000001.tar", 0, b"\xff" * 512)


def flip_bits(root):
    shard = root / "train/shard-000001.tar"
    at = shard.read_bytes().index(b'"text"') + 200  # inside the first payload
    overwrite(shard, at, b"\x55\xaa\x55")


# Fault -> reason, and how many samples of a pass it takes at least and at most.
FAULTS = {
    truncate: (Reject.UNREADABLE, 14, 16),
    delete: (Reject.UNREADABLE, 30, 30),
    delete_index: (Reject.UNREADABLE, 30, 30),
    overwrite_header: (Reject.UNREADABLE, 1, 1),
    flip_bits: (Reject.CHECKSUM, 1, 1),
}


@pytest.fixture
def root(shards, tmp_path):
    return shards.good_set(tmp_path, SAMPLES, per_shard=PER_SHARD)


def split(shards, root, **settings):
    """Settings under which the training split is what a validation reads, once."""
    return shards.config(root, use_train_split_for_val=True, **settings)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_damage_costs_its_samples_and_no_others(shards, root, fault):
    reason, least, most = FAULTS[fault]
    fault(root)
    found = shards.one_pass(split(shards, root, max_bad_fraction=0.3))
    keys = [key for pack in found.packs for key in pack.keys]
    (counted,) = found.counts.refused.items()
    assert counted[0] == reason
    assert least <= counted[1] <= most
    assert len(keys) == len(set(keys)) == SAMPLES - counted[1]
    lost = {f"{i:06d}" for i in range(SAMPLES)} - set(keys)
    assert all(30 <= int(key) < 60 for key in lost)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_training_goes_on_under_the_tolerance_and_ends_above(shards, root, opened, fault, workers):
    fault(root)
    config = shards.config(root, num_workers=workers, max_bad_fraction=0.5)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    while sum(loader.counts().values()) == 0:
        next(loader)
    shards.take(loader, 10)

    config = shards.config(root, num_workers=workers, max_bad_fraction=0.0)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    with pytest.raises(DataError) as caught:
        shards.take(loader, 500)
    text = str(caught.value)
    assert f"{FAULTS[fault][0]}" in text
    assert "train/shard-000001.tar, key " in text
    assert "dataset.max_bad_fraction=0.0" in text
    assert "or raise dataset.max_bad_fraction" in text
    with pytest.raises(DataError, match="max_bad_fraction"):  # and it stays so
        next(loader)
    with pytest.raises(DataError, match="max_bad_fraction"):
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_one_early_fault_among_many_good_samples_is_tolerated(shards, root, opened, workers):
    """1 of 120 is below 1%: it does not matter that it may be among the first that are read."""
    overwrite_header(root)
    config = shards.config(root, num_workers=workers, max_bad_fraction=0.01)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    read = 0
    while read < 400:
        read += len(next(loader).keys)
    assert loader.counts()[Reject.UNREADABLE] >= 2


def test_damage_that_passes_leaves_no_trace(shards, root):
    """A file that comes back is read again: no handle of the damaged one stays open."""
    shard = root / "train/shard-000001.tar"
    content = shard.read_bytes()
    groups = validation_groups(split(shards, root, max_bad_fraction=1.0))
    shard.write_bytes(content[: len(content) // 2])
    assert sum(len(pack.keys) for pack in groups.read(groups.plan(99).groups)) < SAMPLES
    shard.write_bytes(content)
    assert sum(len(pack.keys) for pack in groups.read(groups.plan(99).groups)) == SAMPLES


def unusable(shards, reason):
    good_latent, good_text = torch.zeros(2, 1, 4, 4), torch.ones(2, 8)
    nan = torch.full((2, 1, 4, 4), torch.nan)
    return {
        Reject.CHANNELS: shards.ours(torch.zeros(4, 1, 4, 4), good_text),
        Reject.NOT_PATCHABLE: shards.ours(torch.zeros(2, 1, 5, 4), good_text),
        Reject.TOO_LONG: shards.ours(torch.zeros(2, 2, 16, 18), good_text),
        Reject.NO_TEXT: shards.ours(good_latent, None),
        Reject.TEXT_WIDTH: shards.ours(good_latent, torch.ones(2, 5)),
        Reject.NOT_FINITE: shards.ours(nan, good_text),
        Reject.TEXT_NOT_FINITE: shards.ours(good_latent, torch.full((2, 8), torch.inf)),
        Reject.UNDECODABLE: {"safetensors": b"?", "json": b"{}"},
        Reject.MISSING_PART: {"json": b"{}"},
        Reject.NEWER: shards.ours(good_latent, good_text, format_version=2),
        Reject.LOSS_MASK: shards.ours(good_latent, good_text, loss_mask=torch.ones(1, 1, 4, 3)),
        Reject.LOSS_WEIGHT: shards.ours(good_latent, good_text, loss_weight=-1),
        Reject.LOGVAR: shards.ours(good_latent, good_text, latent_logvar=torch.zeros(2, 1, 4, 3)),
        Reject.LEVEL_INDEX: shards.ours(good_latent, good_text, timestep=8),
        Reject.CHECKSUM: shards.ours(good_latent, good_text, crc32={"safetensors": "00000000"}),
    }[reason]


# The others need a shard that is gone, a table of positions, inputs beside text, other
# networks, or pairs.
OTHERS = {Reject.UNREADABLE, Reject.BEYOND_TABLE, Reject.NO_INPUT, Reject.NO_PAIR}
OTHERS |= {Reject.INPUT_SHAPE, Reject.INPUT_NOT_FINITE, Reject.TOKENS, Reject.TEXT_ROWS}
REASONS = [reason for reason in Reject if reason not in OTHERS]


def test_every_reason_is_counted_once_for_each_sample(shards, tmp_path, opened):
    samples = [shards.good(i) for i in range(40)]
    for index, reason in enumerate(REASONS):
        for copy in range(index % 3 + 1):
            samples.insert(3 * index + copy, unusable(shards, reason))
    shards.write(tmp_path, samples)
    found = shards.one_pass(split(shards, tmp_path, max_bad_fraction=1.0))
    assert sum(len(pack.keys) for pack in found.packs) == 40
    assert found.counts.refused == {reason: i % 3 + 1 for i, reason in enumerate(REASONS)}


@pytest.mark.parametrize(
    ("reason", "values"),
    [
        (Reject.CHANNELS, "latent [4, 1, 4, 4] has 4 channels, but model.in_channels=2"),
        (Reject.NOT_FINITE, "32 of 32 numbers"),  # seen when it is read for its pack
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_without_a_usable_sample_ends_with_the_reasons(
    shards, tmp_path, opened, workers, reason, values
):
    shards.write(tmp_path, [unusable(shards, reason)] * 30)
    config = shards.config(tmp_path, num_workers=workers)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    with pytest.raises(DataError) as caught:
        next(loader)
    assert "no usable sample" in str(caught.value)
    assert f"{reason}; the last one: " in str(caught.value)
    assert values in str(caught.value)
    assert "train/shard-00000" in str(caught.value)


@pytest.mark.parametrize("reason", [Reject.TEXT_WIDTH, Reject.TEXT_NOT_FINITE])
def test_validation_without_a_usable_sample_ends_with_the_reasons(shards, tmp_path, opened, reason):
    shards.write(tmp_path, [unusable(shards, reason)] * 5)
    with pytest.raises(DataError, match=rf"no usable sample.*\n.*5 x {reason}"):
        shards.one_pass(split(shards, tmp_path))


@pytest.mark.parametrize("reason", [Reject.CHANNELS, Reject.CHECKSUM])
def test_a_part_of_a_blend_without_a_usable_sample_ends_the_run(shards, tmp_path, opened, reason):
    """The other part would hide it: its samples keep coming."""
    shards.good_set(tmp_path / "a", 30)
    shards.write(tmp_path / "b", [unusable(shards, reason)] * 30)
    blend = (BlendEntry(path=str(tmp_path / "a")), BlendEntry(path=str(tmp_path / "b")))
    config = shards.config(blend=blend, max_bad_fraction=1.0)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    with pytest.raises(DataError, match=rf"no usable sample(?s:.)*{reason}"):
        shards.take(loader, 2000)


def large_set(shards, root, first=0):
    """Samples that are read when they are chosen; small ones are when their turn comes."""
    samples = []
    for index in range(first, first + SAMPLES):
        size = (2, 1, 4 + 2 * (index % 4), 6)
        samples.append(shards.ours(torch.full(size, index / 9), torch.ones(1200, 8).bfloat16()))
    return shards.write(root, samples, per_shard=PER_SHARD, first=first)


def test_damage_to_samples_in_waiting_is_seen_when_they_are_chosen(shards, root):
    """What waits is not in memory. Each damaged one leaves its pack, and is named and counted."""
    large_set(shards, root)
    settings = {"packing_buffer_size": 100, "max_bad_fraction": 1.0}
    config = split(shards, root, **settings)
    expected = [pack.keys for pack in shards.one_pass(config).packs]
    groups = validation_groups(config)
    plan = groups.plan(99)
    found = [pack.keys for pack in groups.read(plan.groups[:1])]
    shard = root / "train/shard-000001.tar"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"\x80\x3f" * 50, b"\x00\x40" * 50))  # text: 2 for 1
    found += [pack.keys for pack in groups.read(plan.groups[1:])]
    gone = [key for keys in expected[1:] for key in keys if 30 <= int(key) < 60]
    assert found[0] == expected[0]
    left = [tuple(key for key in keys if key not in gone) for keys in expected]
    assert found == [keys for keys in left if keys]
    counts = plan.packs([], late=groups.late).counts
    assert counts.refused == {Reject.CHECKSUM: len(gone)}
    assert "train/shard-000001.tar, key 0000" in counts.newest[Reject.CHECKSUM]
    assert counts.read == SAMPLES


def test_a_shard_that_is_replaced_while_its_samples_wait(shards, root):
    """Other lengths would overfill a pack."""
    large_set(shards, root)
    settings = {"packing_buffer_size": 100, "max_bad_fraction": 1.0}
    groups = validation_groups(split(shards, root, **settings))
    plan = groups.plan(99)
    large_set(shards, root, first=1)
    with pytest.raises(DataError, match=r"shard-000000.tar, key 0000.*the size of this sample"):
        list(groups.read(plan.groups))


@pytest.mark.parametrize(
    ("reason", "workers"), [*((reason, 0) for reason in REASONS), (Reject.TOO_LONG, 2)]
)
def test_every_reason_has_the_same_bound(shards, tmp_path, opened, workers, reason):
    samples = [shards.good(i) for i in range(120)]
    samples[30:36] = [unusable(shards, reason)] * 6
    shards.write(tmp_path, samples)
    config = shards.config(tmp_path, num_workers=workers, max_bad_fraction=0.05)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    shards.take(loader, 40)  # 6 of 120 are no more than one in twenty
    assert loader.counts()[reason] >= 6
    config = shards.config(tmp_path, num_workers=workers, max_bad_fraction=0.04)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    with pytest.raises(DataError, match=r"more than dataset.max_bad_fraction=0.04") as caught:
        shards.take(loader, 60)
    assert f"x {reason}; the last one: {tmp_path}/train/shard-000001.tar, key" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reason", [Reject.TOO_LONG, Reject.NOT_FINITE])
def test_nearly_no_usable_sample_ends_the_run_before_a_first_pack(
    shards, tmp_path, opened, workers, reason
):
    """A pack of the few good ones would come after so many passes that the run looks hung."""
    samples = [unusable(shards, reason)] * 400 + [shards.good(5)] * 2
    shards.write(tmp_path, samples, per_shard=100)
    settings = {"shuffle_buffer_size": 1000, "packing_buffer_size": 1000}
    config = shards.config(tmp_path, num_workers=workers, **settings)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    with pytest.raises(DataError, match=rf"more than dataset.max_bad_fraction(?s:.)*{reason}"):
        next(loader)
    assert loader.reject_counts().read < 5000


def test_refused_samples_are_named_once_each(shards, root, opened):
    truncate(root)
    found = shards.one_pass(split(shards, root, max_bad_fraction=1.0))
    refused = found.refused
    assert len(found.packs) > 0
    assert len({one.key for one in refused}) == len(refused)
    assert len(refused) == found.counts.refused[Reject.UNREADABLE]
    assert {one.shard for one in refused} == {"train/shard-000001.tar"}
    assert {one.dataset for one in refused} == {str(root)}
    assert {one.reason for one in refused} == {Reject.UNREADABLE.value}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_sample_that_is_gone_is_named_on_resume(shards, root, opened, workers):
    config = shards.config(root, num_workers=workers, max_bad_fraction=1.0)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    shards.take(loader, 3)
    state = loader.state_dict()
    for shard in (root / "train").glob("*.tar"):
        shard.unlink()
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    loader.load_state_dict([state])
    with pytest.raises(DataError, match=r"could be used before, but not now .*shard"):
        shards.take(loader, 5)


def test_counts_are_plain(shards, root, opened):
    flip_bits(root)
    loader = opened(
        build_train_loader(shards.config(root, max_bad_fraction=1.0), rank=0, world_size=1)
    )
    while not loader.counts():
        next(loader)
    assert json.loads(json.dumps(loader.counts())) == {"payload does not match its checksum": 1}
