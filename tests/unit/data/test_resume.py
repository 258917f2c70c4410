"""A loader that goes on from a saved state gives what an undisturbed one gives."""

import pickle
import threading
import time
from dataclasses import replace

import pytest
import torch

from dit.config import Balance, BlendEntry
from dit.data import DataError
from tests.unit.data.conftest import built

BALANCED = {"even": Balance.FLOPS, "at like cost": Balance.FLOPS_TARGET}


@pytest.fixture(scope="module")
def root(tmp_path_factory, shards):
    root = tmp_path_factory.mktemp("resume")
    samples = [shards.good(i) for i in range(90)]
    # Large ones are read when they are chosen. Refused ones are part of the position: some are seen
    # at once, others when they are read for their pack.
    for i in range(0, 90, 9):
        samples[i] = shards.ours(torch.randn(5, 1, 4, 4), torch.ones(1, 8))
        samples[i + 2] = shards.ours(torch.randn(2, 1, 6, 4), torch.ones(600, 8))
        samples[i + 4] = shards.ours(torch.full((2, 1, 4, 4), torch.nan), torch.ones(600, 8))
    shards.write(root / "a", samples)
    shards.good_set(root / "b", 40, first=500)
    return root


def kinds(shards, root, kind, workers):
    settings = {"num_workers": workers, "max_bad_fraction": 1.0}
    if kind == "mock":
        return shards.config(mock=True, **settings)
    if kind == "blend":
        blend = (BlendEntry(path=str(root / "a"), weight=3.0), BlendEntry(path=str(root / "b")))
        return shards.config(blend=blend, **settings)
    if kind in BALANCED:
        even = {"balance": BALANCED[kind], "balance_packs": 12}
        return shards.config(root / "a", **settings, **even)
    return shards.config(root / "a", **settings)


def same(left, right):
    tensors = ("latent_TC", "position_TA", "text_LE", "fps_N", "is_real_T", "segment_T")
    return (left.keys, left.grids, left.pack_id) == (
        right.keys,
        right.grids,
        right.pack_id,
    ) and all(
        torch.equal(getattr(left, n).nan_to_num(), getattr(right, n).nan_to_num())
        if getattr(left, n).is_floating_point()
        else torch.equal(getattr(left, n), getattr(right, n))
        for n in tensors
    )


def test_a_position_fits_the_data_that_it_is_in(shards, root, opened):
    state, config = None, kinds(shards, root, "even", workers=0)
    for seed, fits in ((1, True), (1, True), (2, False)):
        of_seed = replace(config, rng=replace(config.rng, seed=seed))
        loader = opened(built(of_seed, rank=0, world_size=1))
        state = state or loader.state_dict()
        assert loader.fits([state]) is fits


def continued(config, opened, state):
    loader = opened(built(config, rank=0, world_size=1))
    loader.load_state_dict([pickle.loads(pickle.dumps(state))])
    return loader


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["one", "blend", "mock", *BALANCED])
def test_resume_is_exact(shards, root, opened, kind, workers):
    """Saved at several points, twice with one pack in between, counts and buffers included."""
    config = kinds(shards, root, kind, workers)
    straight = opened(built(config, rank=0, world_size=1))
    packs, counts, states = [], [], {0: straight.state_dict()}
    for step in range(1, 70):
        packs.append(next(straight))
        counts.append(straight.counts())
        if step in (1, 30):
            states[step] = straight.state_dict()
    for step, state in states.items():
        loader = continued(config, opened, state)
        assert loader.counts() == (counts[step - 1] if step else {})
        assert same(next(loader), packs[step])
        assert loader.counts() == counts[step]
        # After one pack the other worker has given none; Energon alone forgets where it stood.
        again = continued(config, opened, loader.state_dict())
        loader.close()
        for i in range(step + 1, step + 20):
            assert same(next(again), packs[i])
            assert again.counts() == counts[i]
        again.close()
    assert kind == "mock" or sum(counts[-1].values()) > 5


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_snapshots_that_are_old_are_replayed(shards, root, opened, workers):
    """With the default snapshot interval a state is an old snapshot and packs to skip."""
    config = kinds(shards, root, "one", workers)
    often = replace(config, dataset=replace(config.dataset, checkpoint_every_sec=1e-6))
    for used in (config, often):
        loader = opened(built(used, rank=0, world_size=1))
        shards.take(loader, 41)
        state = loader.state_dict()
        expected = shards.take(loader, 30)
        loader.close()
        assert shards.take(continued(config, opened, state), 30) == expected


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_a_worker_asked_in_the_instant_of_its_start(shards, root, opened, monkeypatch, resumed):
    """Energon's thread that answers can run before its worker has read what to restore."""
    config = kinds(shards, root, "one", 2)
    loader = opened(built(config, rank=0, world_size=1))
    state = loader.state_dict()
    if resumed:
        shards.take(loader, 11)
        state = loader.state_dict()
    expected = shards.take(loader, 12)
    loader.close()
    start = threading.Thread.start

    def delayed(thread):
        start(thread)
        if thread.name == "command_thread" and torch.utils.data.get_worker_info().id == 1:
            time.sleep(1.0)

    monkeypatch.setattr(threading.Thread, "start", delayed)
    loader = continued(config, opened, state)
    first = shards.take(loader, 1)
    state = loader.state_dict()  # the second worker sleeps with its thread awake
    monkeypatch.undo()
    assert first + shards.take(continued(config, opened, state), 11) == expected


def test_a_state_may_be_loaded_more_than_once(shards, root, opened):
    config = kinds(shards, root, "one", 0)
    loader = opened(built(config, rank=0, world_size=1))
    shards.take(loader, 5)
    state = loader.state_dict()
    expected = shards.take(loader, 20)
    for _ in range(2):
        loader = opened(built(config, rank=0, world_size=1))
        loader.load_state_dict([state])
        assert loader.state_dict() == state
        assert shards.take(loader, 20) == expected


def test_data_may_move_and_still_resume(shards, tmp_path, opened):
    before = shards.config(shards.good_set(tmp_path / "here", 60))
    loader = opened(built(before, rank=0, world_size=1))
    shards.take(loader, 9)
    state, expected = loader.state_dict(), shards.take(loader, 15)
    (tmp_path / "here").rename(tmp_path / "there")
    after = shards.config(tmp_path / "there")
    assert shards.take(continued(after, opened, state), 15) == expected


def test_every_difference_is_named_at_once(shards, root, opened):
    config = kinds(shards, root, "one", 0)
    state = opened(built(config, rank=0, world_size=1)).state_dict()
    other = replace(
        config,
        rng=replace(config.rng, seed=8),
        model=replace(config.model, patch_spatial=1, max_size=(9, 9, 9)),
    )
    loader = opened(built(other, rank=0, world_size=1))
    with pytest.raises(DataError) as caught:
        loader.load_state_dict([state])
    text = str(caught.value)
    assert "rng.seed: 7 when saved, 8 now" in text
    assert "patch_spatial: [1, 2] when saved, [1, 1] now" in text
    assert "max_size" not in text  # rotary positions do not look at it


@pytest.mark.parametrize("outer", ["path", "blend"])
def test_a_weight_in_an_inner_metadataset_is_part_of_the_data(
    shards, root, tmp_path, opened, outer
):
    def mixed(weight):
        head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        (tmp_path / "inner.yaml").write_text(
            f"{head}    blend:\n      - {{weight: {weight}, path: {root}/a}}\n"
            f"      - {{weight: 1, path: {root}/b}}\n"
        )
        (tmp_path / "outer.yaml").write_text(f"{head}    path: inner.yaml\n")
        if outer == "path":
            config = shards.config(tmp_path / "outer.yaml")
        else:
            config = shards.config(blend=(BlendEntry(path=str(tmp_path / "inner.yaml")),))
        return opened(built(config, rank=0, world_size=1))

    state = mixed(1).state_dict()
    mixed(1).load_state_dict([state])
    with pytest.raises(DataError, match="has other shards, splits or weights now"):
        mixed(2).load_state_dict([state])


def test_a_state_with_foreign_code_is_not_run(shards, root, opened, capsys):
    class Attack:
        def __reduce__(self):
            return exec, ("print('code of the checkpoint ran')",)  # Ray replaces print itself

    config = kinds(shards, root, "one", 0)
    loader = opened(built(config, rank=0, world_size=1))
    state = loader.state_dict() | {"readers": pickle.dumps(Attack())}
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.exec"):
        loader.load_state_dict([state])
    assert "ran" not in capsys.readouterr().out
