"""Packs that are taken ahead: nothing says that they were given until it is said that they are."""

from __future__ import annotations

import pickle
from dataclasses import replace
from threading import Thread

import pytest
import torch

from dit.data import DataError, build_train_loader


def ahead(loader, count):
    """Keys of packs taken by another thread, and the error that ended it."""
    keys, errors = [], []
    packs = loader.ahead(count)

    def take():
        try:
            keys.extend(pack.keys for pack in packs)
        except DataError as error:
            errors.append(error)

    thread = Thread(target=take)
    thread.start()
    thread.join()
    return keys, errors


def continued(config, opened, state):
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    loader.load_state_dict([pickle.loads(pickle.dumps(state))])
    return loader


@pytest.mark.parametrize("often", [False, True], ids=["one snapshot", "many"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_position_is_that_of_the_packs_given(shards, tmp_path, opened, workers, often):
    """Also where workers have made many snapshots since, and a run has gone on once already."""
    samples = [shards.good(i) for i in range(60)]
    for i in range(0, 60, 9):  # some are refused, which is counted
        samples[i] = shards.ours(torch.randn(5, 1, 4, 4), torch.ones(1, 8))
    shards.write(tmp_path, samples)
    config = shards.config(tmp_path, num_workers=workers, max_bad_fraction=1.0)
    config = replace(config, train=replace(config.train, global_batch_size=24))
    if often:
        config = replace(config, dataset=replace(config.dataset, checkpoint_every_sec=1e-6))
    straight = opened(build_train_loader(config, rank=0, world_size=1))
    keys, tallies = [], [straight.reject_counts()]
    for pack in (next(straight) for _ in range(90)):
        keys.append(pack.keys)
        tallies.append(straight.reject_counts())
    straight.close()

    loader = opened(build_train_loader(config, rank=0, world_size=1))
    given = 0
    for step in range(3):
        if step == 0:
            assert shards.take(loader, 7) == keys[:7]
            given = 7
        taken, _ = ahead(loader, 24)
        assert taken == keys[given : given + 24]
        assert loader.reject_counts() == tallies[given]
        assert loader.counts() == dict(sorted(tallies[given].refused.items()))
        state = loader.state_dict()
        loader.catch_up()
        assert loader.reject_counts() == tallies[given + 24]
        if step == 1:  # a run that is saved now and started again
            loader.close()
            loader = continued(config, opened, state)
            assert loader.reject_counts() == tallies[given]
            assert shards.take(loader, 24) == keys[given : given + 24]
        given += 24
    assert sum(loader.counts().values()) > 5


def test_an_error_ahead_does_not_keep_a_run_from_saving(shards, tmp_path, opened):
    samples = [shards.good(i) for i in range(120)]
    for i in range(4, 120, 10):
        samples[i]["safetensors"] = samples[i]["safetensors"][:-1]
    shards.write(tmp_path, samples)
    config = shards.config(tmp_path, num_workers=2, max_bad_fraction=0.08)
    loader, good = opened(build_train_loader(config, rank=0, world_size=1)), []
    with pytest.raises(DataError, match="max_bad_fraction"):
        while True:
            good.append(next(loader).keys)
    assert len(good) > 2

    loader = opened(build_train_loader(config, rank=0, world_size=1))
    given = len(good) - 1
    assert shards.take(loader, given) == good[:given]
    taken, errors = ahead(loader, 3)
    assert taken == good[given:] and "max_bad_fraction" in str(errors[0])
    again = continued(config, opened, loader.state_dict())
    assert next(again).keys == good[given]
    with pytest.raises(DataError, match="max_bad_fraction"):
        next(again)
    loader.catch_up()
    for use in (loader.state_dict, loader.__next__):
        with pytest.raises(DataError, match="max_bad_fraction"):
            use()
