"""What reaches the trainer at different numbers of ranks and workers."""

from dataclasses import replace
from itertools import chain, islice

import pytest

from dit.config import BlendEntry
from dit.data import build_train_loader


@pytest.fixture(scope="module")
def root(tmp_path_factory, shards):
    root = tmp_path_factory.mktemp("layouts")
    shards.good_set(root / "a", 130)
    shards.good_set(root / "b", 50, first=1000)
    return root


def config(shards, root, kind, workers):
    if kind == "mock":
        return shards.config(mock=True, num_workers=workers)
    if kind == "blend":
        blend = (
            BlendEntry(path=str(root / "a"), weight=2.0),
            BlendEntry(path=str(root / "b"), weight=1.0),
        )
        return shards.config(blend=blend, num_workers=workers)
    return shards.config(root / "a", num_workers=workers)


@pytest.mark.parametrize("kind", ["one", "blend", "mock"])
def test_two_ranks_of_one_worker_see_what_one_rank_of_two_sees(shards, root, opened, kind):
    """At every step the same global batch of two packs, which decides the optimizer's step."""
    single = opened(build_train_loader(config(shards, root, kind, 2), rank=0, world_size=1))
    ranks = [
        opened(build_train_loader(config(shards, root, kind, 1), rank=rank, world_size=2))
        for rank in range(2)
    ]
    for _ in range(25):
        accumulated = {next(single).keys for _ in range(2)}
        parallel = {next(loader).keys for loader in ranks}
        assert accumulated == parallel


def test_no_worker_and_one_worker_are_the_same(shards, root, opened):
    packs = [
        shards.take(
            opened(build_train_loader(config(shards, root, "one", n), rank=0, world_size=1)), 30
        )
        for n in (0, 1)
    ]
    assert packs[0] == packs[1]


def test_the_seed_decides_the_order(shards, root, opened):
    first = config(shards, root, "one", 0)
    other = replace(first, rng=replace(first.rng, seed=first.rng.seed + 1))
    packs = [
        shards.take(opened(build_train_loader(c, rank=0, world_size=1)), 20)
        for c in (first, first, other)
    ]
    assert packs[0] == packs[1] != packs[2]


def test_one_pass_over_all_ranks_has_every_sample(shards, root, opened):
    """Within two passes' worth of reading, every sample of the set has been given."""
    loaders = [
        opened(build_train_loader(config(shards, root, "one", 0), rank=rank, world_size=3))
        for rank in range(3)
    ]
    keys = [[], [], []]
    for _ in range(60):
        for rank, loader in enumerate(loaders):
            keys[rank] += next(loader).keys
    assert not set(keys[0]) & set(keys[1]) and not set(keys[1]) & set(keys[2])
    assert len(set(chain(*keys))) == 130


@pytest.mark.slow
def test_weights_are_probabilities_of_samples_and_keys_name_the_part(shards, root, opened):
    loader = opened(build_train_loader(config(shards, root, "blend", 0), rank=0, world_size=1))
    keys = list(chain(*(pack.keys for pack in islice(loader, 400))))
    share = sum(key.startswith("a/") for key in keys) / len(keys)
    assert all(key.startswith(("a/", "b/")) for key in keys)
    # Standard deviation of the share is 0.013 for these 1300 samples.
    assert abs(share - 2 / 3) < 0.05


def test_equal_folder_names_in_a_blend_keep_their_keys_apart(shards, tmp_path, opened):
    for part in ("x", "y"):
        shards.good_set(tmp_path / part / "same", 20)
    blend = tuple(BlendEntry(path=str(tmp_path / p / "same")) for p in ("x", "y"))
    loader = opened(build_train_loader(shards.config(blend=blend), rank=0, world_size=1))
    keys = set(chain(*(pack.keys for pack in islice(loader, 60))))
    assert {key.split("/")[0] for key in keys} == {"same-0", "same-1"}


def test_a_metadataset_file_is_a_path(shards, root, tmp_path, opened):
    text = (
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - {{weight: 3, path: {root}/a}}\n      - {{weight: 1, path: {root}/b}}\n"
    )
    (tmp_path / "mix.yaml").write_text(text)
    loader = opened(build_train_loader(shards.config(tmp_path / "mix.yaml"), rank=0, world_size=1))
    keys = set(chain(*(pack.keys for pack in islice(loader, 80))))
    assert {key.split("/")[0] for key in keys} == {"a", "b"}
