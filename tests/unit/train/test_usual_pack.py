"""The pack of a run's own data with which kernels of attention are timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dit.config import MockGeometry
from dit.models.attention.choice import attention_calls
from dit.train import attention_choice
from dit.train.attention_choice import few_shapes, usual_pack
from tests.families.flux import flux_model
from tests.learning import tiny_run

SMALL = MockGeometry(frames=1, height=8, width=8, text_length=5)  # 16 tokens
LARGE = MockGeometry(frames=1, height=32, width=32, text_length=5, weight=3.0)  # 256 tokens
LARGE_ALIKE = replace(LARGE, weight=1.0)


def _config(capacity: int, *samples: MockGeometry):
    config = tiny_run()
    dataset = replace(
        config.dataset, task_encoder_seq_length=capacity, mock_samples=samples or (SMALL,)
    )
    return replace(config, dataset=dataset)


def test_a_pack_is_full_of_the_mixture_by_its_weights():
    pack = usual_pack(_config(32_768, SMALL, LARGE))
    assert sum(tokens for tokens, _ in pack) <= 32_768
    assert {text for _, text in pack} == {5}
    counts = Counter(tokens for tokens, _ in pack)
    assert counts.keys() == {16, 256}
    assert counts[256] / counts[16] == pytest.approx(3, rel=0.3)
    assert pack == usual_pack(_config(32_768, SMALL, LARGE))


def test_samples_of_as_many_tokens_add_their_weights():
    """Two pictures turned by a quarter, and a third one that is as frequent as each."""
    wide, high = replace(SMALL, height=4, width=16), replace(SMALL, height=16, width=4)
    counts = Counter(tokens for tokens, _ in usual_pack(_config(8192, wide, high, LARGE_ALIKE)))
    assert counts[16] / counts[256] == pytest.approx(2, rel=0.5)


@pytest.mark.parametrize("from_shards", [False, True])
def test_a_text_among_the_tokens_of_a_sample_counts_once(monkeypatch, from_shards):
    """In families whose layers attend to both together, a pack of 96 has room for 4 x (16 + 5)."""
    if from_shards:
        monkeypatch.setattr(attention_choice, "length_shares", lambda config: {21: 1.0})
    config = replace(_config(96, SMALL), model=flux_model())
    pack = usual_pack(config)
    assert pack == [(16, 5)] * 4
    calls = attention_calls(config.model, pack, device=torch.device("cpu"))
    assert {sum(call.spans.lengths) for call in calls} == {84}


def test_sizes_of_the_datas_card_come_first(monkeypatch):
    monkeypatch.setattr(attention_choice, "length_shares", lambda config: {100: 1.0})
    assert usual_pack(_config(1024)) == [(100, 5)] * 10


def test_no_more_is_timed_than_a_second_allows(monkeypatch):
    monkeypatch.setattr(attention_choice, "length_shares", lambda config: {75_600: 1.0})
    assert usual_pack(_config(131_072)) == [(32_768, 5)]


@pytest.mark.parametrize(
    ("samples", "mock", "joint", "few"),
    [
        ([(16, 5)] * 4, True, False, True),  # a call of its tokens, and one to the texts
        ([(16, 5)] * 4, False, False, False),  # each text may be of another length
        ([(16, 5)] * 4, False, True, False),
        ([(16, 5), (64, 5), (256, 5)], True, False, False),
        ([(16, 5), (64, 5), (256, 5)], True, True, True),
    ],
)
def test_sdpa_is_timed_where_its_calls_are_few(samples, mock, joint, few):
    config = _config(1024)
    config = replace(config, dataset=replace(config.dataset, mock=mock, path="" if mock else "d"))
    model = flux_model() if joint else config.model
    assert few_shapes(model, config.dataset, samples) == few


def test_texts_that_are_padded_to_one_length_are_no_other_calls():
    config = replace(_config(1024), model=tiny_run(text_pad_to=8).model)
    config = replace(config, dataset=replace(config.dataset, mock=False, path="d"))
    assert few_shapes(config.model, config.dataset, [(16, 5)] * 4)
