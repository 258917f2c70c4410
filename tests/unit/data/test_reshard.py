"""A run that goes on with other ranks and loader workers: no sample is lost or repeated."""

import pickle
from collections import Counter
from itertools import count, islice

import pytest
import torch
from megatron.energon.state import FlexState

from dit.config import Balance, BlendEntry
from dit.data import DataError, Reject, sum_counts
from dit.data.loader_state import FORMAT, LoaderState
from tests.unit.data.conftest import built

COUNTS = {"a": 239, "b": 90}
BALANCED = {"even": Balance.FLOPS, "at like cost": Balance.FLOPS_TARGET}


@pytest.fixture(scope="module")
def root(tmp_path_factory, shards):
    root = tmp_path_factory.mktemp("moving")
    for name, number in COUNTS.items():
        shards.good_set(root / name, number)
    samples = [shards.good(i) for i in range(120)]
    for i in range(0, 120, 8):
        samples[i] = shards.ours(torch.randn(5, 1, 4, 4), torch.ones(1, 8))
        # Large ones are refused when they are read for their pack.
        samples[i + 5] = shards.ours(torch.full((2, 1, 4, 4), torch.nan), torch.ones(600, 8))
    shards.write(root / "refused", samples)
    return root


class Fleet:
    """The loaders of all ranks, in one process."""

    def __init__(self, shards, root, kind, opened):
        self.shards, self.root, self.kind, self.opened = shards, root, kind, opened
        self.states, self.loaders, self.buffer = None, [], 8

    def config(self, workers):
        small = {
            "num_workers": workers,
            "packing_buffer_size": self.buffer,
            "shuffle_buffer_size": 5,
        }
        small |= {"max_bad_fraction": 1.0}
        if self.kind == "mock":
            return self.shards.config(mock=True, **small)
        if self.kind == "blend":
            entries = ((name, 2.0 if name == "a" else 1.0) for name in COUNTS)
            blend = tuple(BlendEntry(path=str(self.root / n), weight=w) for n, w in entries)
            return self.shards.config(blend=blend, **small)
        if self.kind in BALANCED:
            even = {"balance": BALANCED[self.kind], "balance_packs": 5}
            return self.shards.config(self.root / "a", **small, **even)
        return self.shards.config(self.root / self.kind, **small)

    def on(self, ranks, workers, saved_as=FORMAT):
        """Ends the run and starts it again there."""
        if self.loaders:
            states = [loader.state_dict() | {"format": saved_as} for loader in self.loaders]
            self.states = pickle.loads(pickle.dumps(states))
            for loader in self.loaders:
                loader.close()
        self.loaders = [
            self.opened(built(self.config(workers), rank=rank, world_size=ranks))
            for rank in range(ranks)
        ]
        for loader in self.loaders if self.states else ():
            loader.load_state_dict(self.states)
        return self

    def steps(self, number, size):
        """Global batches, as the keys of their packs in no order."""
        for _ in range(number):
            turns = size // len(self.loaders)
            yield sorted(pack.keys for loader in self.loaders for pack in islice(loader, turns))

    def dealt(self):
        """What the readers are to read first, of each dataset: index -> times."""
        found = [Counter() for _ in COUNTS]
        sizes = []
        for loader in self.loaders:
            for reader in LoaderState.of(loader.state_dict()).unpickled():
                sizes.append(0)
                for number, left in enumerate(reader.left):
                    for run in left.runs:
                        found[number].update(range(*run))
                        sizes[-1] += len(range(*run))
        return found, sizes


@pytest.fixture
def fleet(shards, root, opened):
    return lambda kind: Fleet(shards, root, kind, opened)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        # ranks, workers, packs in a global batch, steps; sizes that are no multiple of the readers
        ("a", [(2, 2, 2, 7), (4, 0, 4, 5), (1, 4, 1, 9)]),
        ("blend", [(1, 4, 6, 5), (2, 2, 2, 9)]),
        ("mock", [(4, 1, 8, 3), (2, 2, 2, 8)]),
        ("even", [(2, 2, 2, 7), (4, 0, 4, 5)]),
        ("at like cost", [(2, 2, 2, 7), (4, 0, 4, 5)]),
        ("refused", [(2, 0, 2, 9), (2, 1, 4, 8), (1, 2, 3, 7), (2, 0, 2, 9)]),
    ],
)
def test_as_many_readers_go_on_with_the_same_global_batches(fleet, kind, path):
    """Whatever the size of the batch, and after every move, as in the run that stays."""
    readers = path[0][0] * max(1, path[0][1])
    stays = fleet(kind).on(readers, 0)
    packs = (next(stays.loaders[n % readers]).keys for n in count())
    moves = fleet(kind)
    for ranks, workers, size, steps in path:
        moves.on(ranks, workers)
        for batch in moves.steps(steps, size):
            assert batch == sorted(islice(packs, size))
    said = moves.loaders[0].resharded
    assert f"the same {readers} readers go on" in said
    tallies = [sum(loader.reject_counts().read for loader in f.loaders) for f in (stays, moves)]
    assert tallies[0] == tallies[1]


class Given:
    """Times given, of every sample of every dataset."""

    def __init__(self, kind):
        names = COUNTS if kind == "blend" else ["a" if kind in BALANCED else kind]
        self.names = {f"{name}/" if kind == "blend" else "": COUNTS[name] for name in names}
        self.counted = Counter()

    def add(self, batches):
        self.counted.update(key for batch in batches for keys in batch for key in keys)

    def times(self):
        return [
            [self.counted[f"{prefix}{i:06d}"] for i in range(number)]
            for prefix, number in self.names.items()
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "path"),
    [
        ("a", 45, [(2, 0), (3, 0), (1, 0)]),  # after several passes
        ("a", 1, [(1, 4), (3, 0)]),  # before every reader has given a pack
        ("a", 14, [(2, 2), (1, 1), (1, 2)]),
        ("even", 14, [(1, 2), (3, 0)]),  # packs in waiting are dealt out as well
        ("at like cost", 13, [(1, 2), (3, 0)]),
        ("blend", 6, [(1, 2), (3, 0), (4, 0)]),  # again before the first rest is read
    ],
)
def test_more_or_fewer_readers_share_what_was_left(fleet, kind, steps, path):
    """Every sample is owed as often as it has been given less than those given most."""
    run, given = fleet(kind), Given(kind)
    for number, (ranks, workers) in enumerate(path):
        run.on(ranks, workers)
        if number:
            dealt, sizes = run.dealt()
            most = [max(times) for times in given.times()]
            for times, top, left in zip(given.times(), most, dealt, strict=False):
                assert left == Counter({i: top - n for i, n in enumerate(times)})
            assert max(sizes) - min(sizes) <= 3 * len(most)
            assert f"the {sum(sizes)} samples that were left" in run.loaders[0].resharded
            assert (
                sum(loader.reject_counts().read for loader in run.loaders) == given.counted.total()
            )
        if number < len(path) - 1:
            given.add(run.steps(steps, 12 if steps > 1 else ranks))
    # The last readers come to the end of what they were dealt; nothing overtakes it twice.
    behind = set(range(len(most)))
    while behind:
        given.add(run.steps(1, 12))
        for number, times in enumerate(given.times()):
            if number in behind and min(times) >= most[number]:
                assert max(times) <= most[number] + 1
                behind.remove(number)


@pytest.mark.slow
@pytest.mark.parametrize("path", [[(2, 0), (3, 0), (1, 0)], [(1, 2), (1, 1), (3, 0)]])
def test_mock_samples_are_neither_left_out_nor_repeated(fleet, path):
    run, keys = fleet("mock"), []
    for number, (ranks, workers) in enumerate(path):
        run.on(ranks, workers)
        if number:
            (dealt, _), _ = run.dealt()
            first = max([*dealt, *keys]) + 1
            assert sorted([*dealt.elements(), *keys]) == list(range(first))
        for batch in run.steps(15, 6):
            keys += [int(key.removeprefix("mock-")) for pack in batch for key in pack]
    assert len(keys) == len(set(keys))
    assert set(range(first)) <= set(keys)


@pytest.mark.parametrize("workers", [0, 2])
def test_refused_samples_are_counted_once(fleet, workers):
    """Also where readers have gone on since their last snapshot."""
    run = fleet("refused").on(2, workers)
    given = [key for batch in run.steps(6, 2) for pack in batch for key in pack]
    run.on(3, 0)
    total = sum_counts(loader.reject_counts() for loader in run.loaders)
    assert total.read - sum(total.refused.values()) == len(given)
    while total.read < 120:
        given += [key for batch in run.steps(1, 3) for pack in batch for key in pack]
        total = sum_counts(loader.reject_counts() for loader in run.loaders)
    # Half of them are seen when they are chosen: of the 39 in waiting, some are still to come.
    assert abs(sum(total.refused.values()) - total.read / 4) <= 9
    assert total.refused[Reject.NOT_FINITE] > 5


def test_a_run_may_move_on_before_its_first_pack(fleet):
    run, given = fleet("a").on(1, 2), Given("a")
    given.add(run.steps(5, 4))
    (dealt, _), _ = run.on(3, 0).dealt()
    for ranks, workers in ((3, 1), (2, 0), (1, 4)):
        (again, _), _ = run.on(ranks, workers).dealt()
        assert again == dealt


@pytest.mark.parametrize(("buffer", "others"), [(3, True), (60, False)])
def test_packs_that_would_be_other_ones_now_are_not_taken_for_those_given(fleet, buffer, others):
    """A pack of format 3 held no more samples than were buffered, and is not made again now."""
    run, given = fleet("a"), Given("a")
    run.buffer = buffer
    run.on(1, 2)
    batches = list(run.steps(10, 2))
    given.add(batches)
    assert others == (max(len(keys) for batch in batches for keys in batch) >= buffer)
    (dealt, _), _ = run.on(1, 2, saved_as=3).dealt()
    if not others:
        assert run.loaders[0].resharded == ""
        return
    assert "packs hold more of such short samples than in the version that saved: the " in (
        run.loaders[0].resharded
    )
    (times,) = given.times()
    assert dealt == Counter({i: 1 - n for i, n in enumerate(times)})
    assert run.on(1, 2).loaders[0].resharded == ""  # saved before any pack was given, and as of now


def test_readers_that_are_passes_behind_do_not_catch_up_with_all_of_them(fleet):
    """Long samples are read less often; the rest of a pass must not be made of them alone."""
    (shard,) = fleet("a").on(1, 0).loaders[0]._loader.shards()
    begun = FlexState(_pending_slices_offset=1, _pending_slice_indexes=[], _active_slice_state=[])
    for passes, owed, behind in (((3, 3), 0, 0), ((3, 2), 1, 0), ((3, 0), 1, 1)):
        reads = shard.reads([begun | {"_epoch_count": n} for n in passes])
        assert (reads.times[0] - reads.times[-1], reads.behind) == (owed, behind)


def test_states_of_different_steps_are_refused(fleet):
    run = fleet("a").on(2, 0)
    first = [loader.state_dict() for loader in run.loaders]
    list(run.steps(1, 2))
    second = [loader.state_dict() for loader in run.loaders]
    (target,) = fleet("a").on(1, 0).loaders
    for states, said in (
        ([first[0], second[1]], r"had given \[0, 1\] packs: their loader states are not of one"),
        (second[::-1], r"ranks \[1, 0\], not of one run on 2"),
        (second[:1], r"ranks \[0\], not of one run on 2"),
        (
            [s | {"format": 9} for s in second],
            f"has format 9, but this version reads format {FORMAT}",
        ),
    ):
        with pytest.raises(DataError, match=said):
            target.load_state_dict(states)
    assert target.resharded == ""


def test_an_epochized_blend_goes_on_with_as_many_readers_only(shards, root, tmp_path, opened):
    (tmp_path / "mix.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        f"    blend_epochized:\n      - {{repetitions: 2, path: {root}/a}}\n"
        f"      - {{repetitions: 1, path: {root}/b}}\n"
    )

    def loader(rank, ranks):
        config = shards.config(tmp_path / "mix.yaml")
        return opened(built(config, rank=rank, world_size=ranks))

    pair = [loader(rank, 2) for rank in range(2)]
    states = [one.state_dict() for one in pair if shards.take(one, 5)]
    again = loader(1, 2)
    again.load_state_dict(states)
    assert shards.take(again, 5) == shards.take(pair[1], 5)
    with pytest.raises(DataError, match=r"size 2 x .*_workers 0 when saved, 1 x 0 now.*product is"):
        loader(0, 1).load_state_dict(states)
