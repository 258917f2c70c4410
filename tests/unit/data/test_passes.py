"""How often each sample is seen, against what the loader gives."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from dit.config import Problems
from dit.config.loading.describe import describe
from dit.data import build_train_loader, data_lines, passes_line, steps_of_epochs
from dit.data.preflight import FEW_SAMPLES, samples_a_pack
from tests.unit.data.conftest import SIZES

COUNT = 42  # six samples of each size


@pytest.fixture
def config(shards, tmp_path):
    root = shards.good_set(tmp_path / "set", COUNT)
    sizes = Counter(SIZES[index % len(SIZES)] for index in range(COUNT))
    names = ("num_frames", "height", "width")
    rows = [dict(zip(names, size, strict=True)) | {"samples": n} for size, n in sizes.items()]
    card = {
        "format_version": 1,
        "latent": {"stride": 1, "temporal_stride": 1, "channels": 2},
        "text_encoder": {"width": 8},
        "sizes": rows,
    }
    (root / "dataset_card.json").write_text(json.dumps(card))
    return shards.config(root)


def test_epochs_take_as_many_packs_as_the_loader_needs(config) -> None:
    wanted = replace(config, train=replace(config.train, epochs=20.0, global_batch_size=2))
    steps = steps_of_epochs(wanted).train.train_iters
    loader = build_train_loader(wanted, rank=0, world_size=1)
    seen = sum(next(loader).num_samples for _ in range(2 * steps))
    loader.close()
    assert 18.5 < seen / COUNT < 21.5
    assert steps_of_epochs(config) is config


def test_packs_that_hold_thousands_of_samples_are_counted_right(config) -> None:
    """More than are drawn for the guess."""
    shares = [
        samples_a_pack(replace(config, dataset=replace(config.dataset, task_encoder_seq_length=n)))
        for n in (4096, 4_096_000)
    ]
    assert shares[1] == pytest.approx(1000 * shares[0], rel=0.02)


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
        assert (words in passes_line(run)) == said
        started = replace(run, checkpoint=replace(run.checkpoint, load_hf="weights"))
        assert words not in passes_line(started)


def test_without_sizes_there_is_no_guess(config, shards) -> None:
    mock = shards.config(mock=True)
    assert passes_line(mock) == ""
    given = replace(mock, dataset=replace(mock.dataset, path="mine"))
    for said in (passes_line(given), describe(given, world_size=1)):
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
    assert re.search(r"samples about \d{1,3}(,\d{3})+ times", passes_line(often))
