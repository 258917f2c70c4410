"""How often each sample is seen, against what the loader gives."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from megatron.energon.epathlib import EPath

from dit.config import Balance, BlendEntry, Problems
from dit.models.flux.family import FluxConfig
from dit.sizing.describe import describe
from dit.sizing.passes import (
    FEW_SAMPLES,
    data_lines,
    fill_line,
    forecast_packs,
    length_shares,
    passes_line,
    steps_of_epochs,
)
from tests.unit.data.conftest import SIZES, built

COUNT = 42  # six samples of each size


def card_of(sizes):
    """A dataset card that lists these sizes, a Counter of (frames, height, width)."""
    names = ("num_frames", "height", "width")
    return {
        "format_version": 1,
        "latent": {"stride": 1, "temporal_stride": 1, "channels": 2},
        "text_encoder": {"width": 8},
        "sizes": [
            dict(zip(names, size, strict=True)) | {"samples": n} for size, n in sizes.items()
        ],
    }


@pytest.fixture
def config(shards, tmp_path):
    root = shards.good_set(tmp_path / "set", COUNT)
    card = card_of(Counter(SIZES[index % len(SIZES)] for index in range(COUNT)))
    (root / "dataset_card.json").write_text(json.dumps(card))
    return shards.config(root)


def with_data(config, **data):
    return replace(config, dataset=replace(config.dataset, **data))


def of_columns(shards, root, lengths, *, text=1):
    """A dataset of latents of 2 rows, which are so many tokens each."""
    return shards.write(
        root,
        [shards.ours(torch.zeros(2, 1, 2, 2 * n), torch.zeros(text, 8)) for n in lengths],
        per_shard=500,
    )


RNG = np.random.default_rng(5)
# Tokens of each sample, and further settings of the data.
DISTRIBUTIONS = {
    "one token": ([1] * 700, {"sample_multiple": 1}),
    "equal and short": ([4] * 500, {}),
    "equal and long": ([36] * 60, {}),
    "of all kinds": (RNG.integers(1, 64, 400), {}),
    "mostly short": (np.minimum(RNG.lognormal(1, 1, 500).astype(int) + 1, 60), {}),
    "few long": (np.where(RNG.random(400) < 0.03, 60, 4), {}),
    "two that do not go together": (np.where(RNG.random(100) < 0.5, 40, 28), {}),
    "some do not fit": (RNG.integers(4, 80, 150), {"max_bad_fraction": 1.0}),
    "of like cost": (RNG.integers(1, 40, 150), {"balance": Balance.FLOPS_TARGET}),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_pass_takes_as_many_packs_as_expected(shards, tmp_path, name) -> None:
    """Within 1% of those that the loader itself makes, token by token."""
    lengths, settings = DISTRIBUTIONS[name]
    root = of_columns(shards, tmp_path / "set", lengths)
    config = with_data(shards.config(root), **settings)
    forecast = forecast_packs(config)
    loader = built(config, rank=0, world_size=1)
    one_pass = sum(n for n in lengths if n <= 64)
    packs = tokens = 0
    while tokens < 4 * one_pass:
        packs, tokens = packs + 1, tokens + next(loader).real_tokens
    loader.close()
    assert forecast.packs == pytest.approx(packs * one_pass / tokens, rel=0.01)
    assert forecast.fill == pytest.approx(tokens / packs / 64, rel=0.01)


def test_texts_and_references_that_take_room_count(shards, tmp_path) -> None:
    """Packs of FLUX.1 Kontext are full of texts here, and every third sample has a reference."""
    samples = []
    for n in range(150):
        latent = torch.zeros(2, 1, 2, 2 * (1 + n % 4))
        inputs = {
            "latent": latent,
            "text": torch.zeros(1 + n % 17, 8),
            "pooled_text": torch.zeros(4),
        }
        inputs |= {"reference_latent_0": latent.clone()} if n % 3 == 0 else {}
        about = json.dumps({"format_version": 1, "caption": ""}).encode()
        samples.append({"safetensors": safetensors.torch.save(inputs), "json": about})
    config = shards.config(shards.write(tmp_path / "set", samples))
    network = {"in_channels": 2, "crossattn_emb_size": 8, "pooled_size": 4}
    config = replace(config, model=FluxConfig(name="custom", reference_latents=1, **network))
    forecast = forecast_packs(config)
    loader = built(config, rank=0, world_size=1)
    seen = sum(next(loader).num_samples for _ in range(round(5 * forecast.packs)))
    loader.close()
    assert seen == pytest.approx(5 * 150, rel=0.01)


def test_of_other_disks_the_card_tells(config, monkeypatch) -> None:
    """An object store would be asked for the head of each sample."""
    read = forecast_packs(config)
    monkeypatch.setattr(EPath, "is_local", lambda self: False)
    assert forecast_packs(config) == replace(read, lengths=forecast_packs(config).lengths)
    config_without = with_data(config, path=config.dataset.path)
    (Path(config.dataset.path) / "dataset_card.json").unlink()
    assert forecast_packs(config_without) is None


def test_lengths_of_samples_count_alike_for_each_dataset_of_a_blend(shards, tmp_path) -> None:
    roots = [
        of_columns(shards, tmp_path / name, lengths)
        for name, lengths in (("a", [4, 4, 4, 12]), ("b", [12] * 9))
    ]
    assert length_shares(shards.config(roots[0])) == {4: 0.75, 12: 0.25}
    blend = tuple(BlendEntry(path=str(root)) for root in roots)
    both = with_data(shards.config(roots[0]), path=None, blend=blend)
    assert length_shares(both) == {4: 0.75, 12: 1.25}
    assert length_shares(shards.config(mock=True)) == {}


@pytest.mark.parametrize(
    ("lengths", "settings", "said"),
    [
        ([40] * 50, {}, ("62% of", "_seq_length=40 would fill 100%", "=80 would")),
        ([1] * 50, {}, ("25% of", "dataset.sample_multiple=1 would fill 100%")),
        ([4] * 50, {"packing_buffer_size": 2}, ()),
        ([36, 28] * 50, {}, ()),
    ],
)
def test_packs_that_stay_empty_in_part_are_named_with_what_fills_them(
    shards, tmp_path, lengths, settings, said
) -> None:
    root = of_columns(shards, tmp_path / "set", lengths)
    config = with_data(shards.config(root, num_workers=0), **settings)
    config = replace(config, train=replace(config.train, eval_iters=0))
    (line,) = [fill_line(config, forecast_packs(config))]
    assert all(words in line for words in said) and bool(line) == bool(said)
    assert ("WARNING: " in data_lines(config)) == bool(said)


def test_epochs_take_as_many_packs_as_the_loader_needs(config) -> None:
    wanted = replace(config, train=replace(config.train, epochs=20.0, global_batch_size=2))
    steps = steps_of_epochs(wanted).train.train_iters
    loader = built(wanted, rank=0, world_size=1)
    seen = sum(next(loader).num_samples for _ in range(2 * steps))
    loader.close()
    assert 19.5 < seen / COUNT < 20.5
    assert steps_of_epochs(config) is config


def test_packs_that_hold_thousands_of_samples_are_counted_right(config) -> None:
    """More than there are."""
    shares = [
        forecast_packs(with_data(config, task_encoder_seq_length=n)).samples_a_pack
        for n in (4096, 4_096_000)
    ]
    assert shares[1] == pytest.approx(1000 * shares[0], rel=0.01)


def said_of(config):
    return passes_line(config, forecast_packs(config))


def test_a_dry_run_says_how_often_each_sample_is_seen(config) -> None:
    run = replace(config, train=replace(config.train, epochs=7.0, eval_iters=0))
    said = data_lines(steps_of_epochs(run))
    assert f"each of the {COUNT} training samples about 7" in said.splitlines()[-1]


def test_a_run_from_scratch_that_sees_few_samples_says_so(config) -> None:
    words = "few for a run from scratch"
    enough = math.ceil(FEW_SAMPLES / COUNT)
    for epochs, said in ((7, True), (enough, False)):
        train = replace(config.train, epochs=float(epochs), global_batch_size=1)
        run = steps_of_epochs(replace(config, train=train))
        assert (words in said_of(run)) == said
        started = replace(run, checkpoint=replace(run.checkpoint, load_hf="weights"))
        assert words not in said_of(started)


def test_without_sizes_there_is_no_guess(config, shards) -> None:
    mock = shards.config(mock=True)
    assert said_of(mock) == ""
    given = replace(mock, dataset=replace(mock.dataset, path="mine"))
    for said in (said_of(given), describe(given, world_size=1)):
        assert "dataset.path=mine is not read" in said
    with pytest.raises(Problems, match=r"train\.epochs=2 counts passes .* set train\.train_iters"):
        steps_of_epochs(replace(mock, train=replace(mock.train, epochs=2.0)))


def test_epochs_that_do_not_fit_other_keys_name_both(config) -> None:
    train = replace(config.train, train_iters=1000, epochs=3.0)
    run = replace(config, train=train, scheduler=replace(config.scheduler, lr_warmup_iters=900))
    with pytest.raises(Problems, match=r"train\.epochs=3 is \d+ steps .*lr_warmup_iters=900"):
        steps_of_epochs(run)


def test_many_passes_are_written_out(config) -> None:
    often = replace(config, train=replace(config.train, train_iters=100_000, global_batch_size=4))
    assert re.search(r"samples about \d{1,3}(,\d{3})+ times", said_of(often))
