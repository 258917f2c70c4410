"""What ranks open when a run starts or resumes: each its own, whatever their number."""

from __future__ import annotations

import json

import pytest

from tests.launching import ROOT, SMALL, command, run

RANKS = 4


@pytest.fixture(scope="module")
def ranks(digits, tmp_path_factory):
    """What each of four ranks has done."""
    done = run(
        command(
            "start_at_scale.py",
            str(tmp_path_factory.mktemp("states")),
            "--config-file",
            str(ROOT / "conf/dit_digits.yaml"),
            f"dataset.path={digits}",
            *SMALL,
            "dataset.num_workers=0",
            "train.global_batch_size=4",
            "train.eval_iters=7",
            nproc=RANKS,
            folder="tests",
        ),
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_resume_on_as_many_ranks_opens_one_loader_state_a_rank(ranks):
    for number, rank in enumerate(ranks):
        assert rank["resumed"]["own"] == [f"loader_{number:05d}.pt"]
        assert rank["resumed"]["exact"]


def test_a_resume_on_other_ranks_opens_every_loader_state_once(ranks):
    shared = [rank["resumed"]["shared"] for rank in ranks]
    assert shared == [
        [f"loader_{n:05d}.pt" for n in numbers] for numbers in ((0, 2), (1, 3), (), ())
    ]
    assert all(rank["resumed"]["complete"] for rank in ranks)


def test_validation_packs_are_read_by_the_ranks_that_keep_them(ranks):
    """The first rank decodes the others as well: digits are too small to read their heads alone."""
    found = [rank["validated"] for rank in ranks]
    assert all(one["decoded"] == one["samples"] > 0 for one in found[1:])
    assert found[0]["decoded"] > found[0]["samples"]
    assert [one["packs"] for one in found] == [2, 2, 2, 1]
    assert all(one["same"] for one in found)


def test_each_weight_is_drawn_by_one_data_rank_and_is_what_one_rank_alone_draws(ranks):
    drawn = [rank["drawn"] for rank in ranks]
    assert sum(one["mine"] for one in drawn) == drawn[0]["all"]
    assert max(one["mine"] for one in drawn) < 1.2 * drawn[0]["all"] / RANKS
    assert all(one["same"] for one in drawn)


@pytest.mark.parametrize(
    ("layout", "calls", "own"),
    [
        ("dp4", 3, 3),  # 50 and 17 where each has its own
        ("tp2 dp2", 8, 5),  # 41 and 17
        ("cp2 dp2", 7, 5),  # 48 and 17
        ("pp2 dp2", 8, 5),  # 45 and 17
        ("tp2 cp2", 10, 6),  # 41 and 17
    ],
)
def test_groups_that_nothing_uses_make_no_communicator(ranks, layout, calls, own):
    """Calls of new_group in all, and the groups that a rank is in."""
    assert [rank["groups"][layout] for rank in ranks] == [[calls, own]] * RANKS
