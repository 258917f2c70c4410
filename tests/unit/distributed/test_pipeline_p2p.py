"""Which shapes come to a pipeline stage, and in which order."""

from __future__ import annotations

import pytest

from dit.distributed.pipeline_p2p import received


def _packs(*, stage: int, stages: int, virtual: int, packs: int) -> tuple[list[int], list[int]]:
    """Numbers of the packs that a stage hears of from the previous and the next one."""
    shapes = [[number, 1, 8] for number in range(packs)]
    both = received(shapes, stage=stage, stages=stages, virtual=virtual)
    previous, following = ([shape[0] for shape in shapes] for shapes in both)
    return previous, following


def test_a_plain_pipeline_has_two_ends():
    assert _packs(stage=0, stages=3, virtual=1, packs=4) == ([], [0, 1, 2, 3])
    assert _packs(stage=1, stages=3, virtual=1, packs=4) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert _packs(stage=2, stages=3, virtual=1, packs=4) == ([0, 1, 2, 3], [])


def test_packs_go_round_once_for_each_virtual_stage_in_groups_of_the_stages():
    inside = [0, 1, 0, 1, 2, 3, 2, 3]  # two packs at a time, through both virtual stages
    assert _packs(stage=0, stages=2, virtual=2, packs=4) == ([0, 1, 2, 3], inside)
    assert _packs(stage=1, stages=2, virtual=2, packs=4) == (inside, [0, 1, 2, 3])


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_pack_is_heard_of_as_often_as_it_is_sent(stages, virtual, groups):
    packs = stages * groups
    for stage in range(stages):
        both = _packs(stage=stage, stages=stages, virtual=virtual, packs=packs)
        for numbers, end in zip(both, (0, stages - 1), strict=True):
            times = virtual - (stage == end)
            assert sorted(numbers) == sorted([*range(packs)] * times)
