"""Packs over context ranks and pipeline stages, as numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dit.batch import Problem, SequenceShard
from dit.config_loading import load_config
from dit.distributed.model_parallel import received_shapes, split_tokens
from dit.layout_check.names import ONE, kind_settings, parse_layout
from dit.layout_check.program import STEPS, _packs
from dit.models.layers.context_parallel import TokenOrder
from recipes.check_layouts import layout_check
from tests.packs import random_pack, tiny_model

MODEL = tiny_model()
BATCH = random_pack([(1, 4, 5), (2, 2, 2), (1, 1, 1)], [5, 2, 1], model=MODEL)  # 20, 8, 1 tokens


KINDS = ({}, {"halves": True}, {"contiguous": True})
"""What context ranks have of a pack."""


def _split(count: int, multiple: int = 1, **kind: bool) -> list:
    problem = Problem(
        input_TC=torch.arange(len(BATCH.latent_TC)).float()[:, None],
        level_M=torch.zeros(3),
        target_TC=BATCH.latent_TC * 2,
        weight_N=torch.ones(3),
        noise_N=torch.ones(3),
    )
    return [
        split_tokens(
            BATCH,
            problem,
            share=SequenceShard(index=i, count=count, **kind),
            multiple=multiple,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_token_is_on_one_rank(count, kind):
    if kind.get("halves") and count == 8:
        pytest.skip("a sample has 16 tokens in the least")
    parts = _split(count, **kind)
    rows = torch.cat([problem.input_TC.flatten() for _, problem in parts])
    assert sorted(rows.tolist()) == list(range(len(BATCH.latent_TC)))
    for batch, problem in parts:
        mine = problem.input_TC.flatten().long()
        assert torch.equal(batch.latent_TC, BATCH.latent_TC[mine])
        assert torch.equal(batch.segment_T, BATCH.segment_T[mine])
        assert torch.equal(problem.target_TC, 2 * batch.latent_TC)
        real = torch.zeros_like(batch.is_real_T)
        for start, length in batch.shared_spans:
            real[start : start + length] = True
        assert torch.equal(real, batch.is_real_T)
    assert sum(n for batch, _ in parts for _, n in batch.shared_spans) == BATCH.real_tokens


def test_every_sample_is_shared_equally():
    for batch, _ in _split(4):
        sizes = [b - a for a, b in zip(BATCH.starts, BATCH.starts[1:], strict=False)]
        assert batch.segment_T.bincount().tolist() == [size // 4 for size in sizes]


def test_filling_comes_at_the_end_and_is_padding():
    (batch, problem), _ = _split(2, multiple=7)
    rows = len(BATCH.latent_TC) // 2
    assert len(batch.latent_TC) % 7 == 0
    assert not batch.is_real_T[rows:].any()
    assert (problem.input_TC[rows:] == 0).all()
    assert batch.starts == BATCH.starts


def test_ranks_of_a_ring_have_a_piece_from_either_end():
    """Transformer Engine's order: of 2 R pieces the ones numbered r and 2 R - 1 - r."""
    for rank, (_, problem) in enumerate(_split(2, halves=True)):
        rows = [
            torch.arange(start, stop).chunk(4)[piece]
            for start, stop in pairwise(BATCH.starts)
            for piece in (rank, 3 - rank)
        ]
        assert torch.equal(problem.input_TC.flatten().long(), torch.cat(rows))


def test_pieces_of_the_pack_follow_each_other():
    """Then what an exchange brings together is in order, and nothing is moved."""
    parts = _split(4, contiguous=True)
    rows = torch.cat([problem.input_TC.flatten() for _, problem in parts])
    assert rows.tolist() == list(range(len(BATCH.latent_TC)))
    order = TokenOrder.of(parts[0][0], rows=len(parts[0][0].latent_TC))
    assert order.to_pack_W is order.to_ranks_W is None and order.arrange(rows) is rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple", [1, 5])
def test_orders_undo_each_other(multiple, kind):
    parts = _split(4, multiple, **kind)
    rows = len(parts[0][0].latent_TC)
    order = TokenOrder.of(parts[0][0], rows=rows)
    gathered = torch.cat([problem.input_TC.flatten() for _, problem in parts])
    whole = order.arrange(gathered)
    assert whole[: len(BATCH.latent_TC)].tolist() == list(range(len(BATCH.latent_TC)))
    assert torch.equal(order.restore(whole), gathered)
    x_W = gathered.clone().requires_grad_()
    (gradient_W,) = torch.autograd.grad(order.arrange(x_W), x_W, whole)
    assert torch.equal(gradient_W, gathered)
    (gradient_W,) = torch.autograd.grad(order.restore(x_W), x_W, gathered)
    assert torch.equal(gradient_W, whole)


def test_the_packs_of_the_layout_check_are_nasty(groups):
    """Padding in most samples, and a context rank that at some point holds nothing else."""
    config = layout_check()
    packs = _packs(config, parse_layout(ONE), steps_of=[parse_layout(ONE)])
    assert len(packs) == STEPS * config.train.global_batch_size
    sizes = [
        (real, stop - start)
        for pack in packs
        for real, start, stop in zip(pack.num_tokens, pack.starts, pack.starts[1:], strict=False)
    ]
    assert sum(real < padded for real, padded in sizes) > len(sizes) / 2
    halves = [all(2 * n <= 16 for n in pack.num_tokens) for pack in packs]
    assert any(halves[:8])  # two steps, which tests train
    assert {frames for pack in packs for frames, _, _ in pack.grids} == {1, 5}
    assert len({n for pack in packs for n in pack.text_starts}) > 10


@pytest.mark.parametrize("size", ["wan2.2_ti2v_5b", "cosmos_predict2_2b_video2world"])
def test_given_frames_are_in_the_first_step_of_the_layout_check(groups, size: str) -> None:
    config = load_config(
        layout_check(), overrides=kind_settings(size, layout_check().dataset.mock_samples)
    )
    packs = _packs(config, parse_layout(ONE), steps_of=[parse_layout(ONE)])
    assert any(pack.has_given_tokens for pack in packs[: config.train.global_batch_size])


def _received_packs(
    *, stage: int, stages: int, virtual: int, packs: int
) -> tuple[list[int], list[int]]:
    """Numbers of the packs that a stage hears of from the previous and the next one."""
    shapes = [[number, 1, 8] for number in range(packs)]
    both = received_shapes(shapes, stage=stage, stages=stages, virtual=virtual)
    previous, following = ([shape[0] for shape in shapes] for shapes in both)
    return previous, following


def test_a_plain_pipeline_has_two_ends():
    assert _received_packs(stage=0, stages=3, virtual=1, packs=4) == ([], [0, 1, 2, 3])
    assert _received_packs(stage=1, stages=3, virtual=1, packs=4) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert _received_packs(stage=2, stages=3, virtual=1, packs=4) == ([0, 1, 2, 3], [])


def test_packs_go_round_once_for_each_virtual_stage_in_groups_of_the_stages():
    inside = [0, 1, 0, 1, 2, 3, 2, 3]  # two packs at a time, through both virtual stages
    assert _received_packs(stage=0, stages=2, virtual=2, packs=4) == ([0, 1, 2, 3], inside)
    assert _received_packs(stage=1, stages=2, virtual=2, packs=4) == (inside, [0, 1, 2, 3])


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_pack_is_heard_of_as_often_as_it_is_sent(stages, virtual, groups):
    packs = stages * groups
    for stage in range(stages):
        both = _received_packs(stage=stage, stages=stages, virtual=virtual, packs=packs)
        for numbers, end in zip(both, (0, stages - 1), strict=True):
            times = virtual - (stage == end)
            assert sorted(numbers) == sorted([*range(packs)] * times)
