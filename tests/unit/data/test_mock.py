"""Synthetic data, and how full packs of them get."""

from dataclasses import replace
from itertools import chain, islice

import pytest
import torch

from dit.config import DatasetConfig, MockGeometry, RunConfig
from dit.data import build_train_loader, dataset_card, null_inputs
from dit.data.mock import mock_record
from dit.data.records import read_record
from dit.models.dit.family import DitConfig

# One token of text, a sample of 9/16 of a pack, and padding in four kinds of five.
NASTY = (
    MockGeometry(frames=1, height=64, width=64, text_length=1, weight=2.0),
    MockGeometry(frames=1, height=30, width=34, text_length=12, weight=2.0),
    MockGeometry(frames=9, height=63 * 2, width=16, text_length=40, fps=16.0, weight=1.0),
    MockGeometry(frames=5, height=26, width=46, text_length=7, fps=24.0, weight=1.0),
    MockGeometry(frames=1, height=18, width=22, text_length=3, weight=2.0),
)


def nasty(**settings):
    """Geometries of a real run with few channels, which do not matter to the packing."""
    data = {
        "mock": True,
        "mock_samples": NASTY,
        "task_encoder_seq_length": 8192,
        "sample_multiple": 16,
        "packing_buffer_size": 100,
        "num_workers": 0,
    }
    return RunConfig(
        model=replace(DitConfig(), in_channels=1, crossattn_emb_size=2),
        dataset=DatasetConfig(**(data | settings)),
    )


def test_the_mixture_is_as_nasty_as_it_says():
    config = nasty()
    tokens = [g.frames * (g.height // 2) * (g.width // 2) for g in NASTY]
    assert sum(tokens[i] % 16 != 0 for i in range(5)) == 4
    assert max(map(config.mock_tokens, NASTY)) > 8192 / 2
    assert min(g.text_length for g in NASTY) == 1


@pytest.mark.slow
def test_packs_of_the_mixture_are_at_least_97_percent_full(opened):
    loader = opened(build_train_loader(nasty(), rank=0, world_size=1))
    packs = list(islice(loader, 300))
    fill = sum(pack.starts[-1] for pack in packs) / (300 * 8192)
    assert fill >= 0.97
    keys = list(chain(*(pack.keys for pack in packs)))
    assert len(keys) == len(set(keys))
    # None is left behind: of the first samples all have come, and what waits fits the buffers.
    numbers = sorted(int(key.removeprefix("mock-")) for key in keys)
    assert numbers[-1] + 1 - len(numbers) <= 100 + 100


def test_packs_of_a_finite_stream_hold_every_sample_once(shards, tmp_path, opened):
    records = [mock_record(nasty(), seed=3, index=i) for i in range(430)]
    shards.write(tmp_path, records, per_shard=100)
    config = nasty(mock=False, path=str(tmp_path), use_train_split_for_val=True)
    packs = shards.one_pass(config).packs
    keys = sorted(chain(*(pack.keys for pack in packs)))
    assert keys == [f"{i:06d}" for i in range(430)]
    assert all(pack.starts[-1] <= 8192 for pack in packs)
    fill = sum(pack.starts[-1] for pack in packs) / (len(packs) * 8192)
    assert fill >= 0.95  # the last buffer is emptied, so its packs are not full


def test_records_are_those_of_a_shard(shards):
    config = shards.config(mock=True)
    record = read_record(mock_record(config, seed=1, index=5))
    again = read_record(mock_record(config, seed=1, index=5))
    assert record.latent_CFHW.dtype == torch.bfloat16
    assert record.text_LE.dtype == torch.bfloat16
    assert torch.equal(record.latent_CFHW, again.latent_CFHW)
    for seed, index in ((1, 6), (2, 5)):
        other = read_record(mock_record(config, seed=seed, index=index))
        assert other.latent_CFHW.flatten()[0] != record.latent_CFHW.flatten()[0]


def test_numbers_are_unit_normal_and_kinds_follow_their_weights(shards):
    config = shards.config(mock=True)
    records = [read_record(mock_record(config, seed=0, index=i)) for i in range(600)]
    values = torch.cat([r.latent_CFHW.flatten().float() for r in records])
    assert values.mean().abs() < 0.01 and (values.std() - 1).abs() < 0.01
    share = sum(len(r.text_LE) == 1 for r in records) / 600
    assert share == pytest.approx(0.5, abs=0.07)  # 3.4 standard deviations


def test_ranks_and_workers_deal_the_indices_out(shards, opened):
    config = shards.config(mock=True, num_workers=2, shuffle_buffer_size=0)
    loaders = [opened(build_train_loader(config, rank=r, world_size=2)) for r in range(2)]
    keys = [key for loader in loaders for pack in islice(loader, 20) for key in pack.keys]
    assert all(key.startswith("mock-") for key in keys)
    assert len(keys) == len(set(keys))
    assert {int(key[5:]) % 4 for key in keys} == {0, 1, 2, 3}


def test_mock_data_have_no_card_and_a_zero_null_text(shards):
    config = shards.config(mock=True)
    assert dataset_card(config.dataset) is None
    assert torch.equal(null_inputs(config)["text"], torch.zeros(1, 8))
