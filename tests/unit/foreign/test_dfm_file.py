"""Files written for NVIDIA's DFM load; a key without meaning is named with what replaces it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dit.config import Problems, RunConfig
from dit.config_loading.cli import parse_arguments
from tests.packs import run_config
from tests.tables import table
from tests.their_files import run_and_notes, run_of

DFM = table(__file__, "file")


@pytest.fixture
def dfm_file(tmp_path: Path) -> Path:
    path = tmp_path / "dit_pretrain.yaml"
    path.write_text(DFM)
    return path


def loaded(file: Path) -> RunConfig:
    return parse_arguments(["--config-file", str(file)], recipes={"dit_xl": run_config}).config


def test_keys_with_a_meaning_keep_it(dfm_file: Path) -> None:
    config = loaded(dfm_file)
    assert (config.model.name, config.model.num_attention_heads) == ("dit_xl", 16)
    assert (config.dataset.path, config.dataset.num_workers) == ("DATASET_FOLDER", 20)
    assert config.dataset.task_encoder_seq_length == 15360
    assert (config.checkpoint.save, config.checkpoint.load) == ("dfm_experiment",) * 2
    assert (config.train.global_batch_size, config.train.eval_iters) == (8, 32)
    assert (config.logger.wandb_project, config.logger.wandb_exp_name) == ("DiT", "dfm_experiment")


def test_each_key_without_a_meaning_gets_one_line(dfm_file: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        loaded(dfm_file)
    assert [record.getMessage() for record in caplog.records][:-1] == [
        f'model.qkv_format="thd" ({dfm_file}:5): read, not used: packs are always thd',
        f"checkpoint.load_optim=true ({dfm_file}:16): read, not used: a checkpoint always holds and"
        " restores model, optimizer and loader",
    ]


@pytest.mark.parametrize("token", table(__file__, "other_keys"))
def test_other_keys_of_its_recipes_are_accepted(token: str) -> None:
    config, notes = run_and_notes([token])
    assert config == run_config() and all("read, not used" in note for note in notes) and notes


@pytest.mark.parametrize("token", table(__file__, "refused"))
def test_a_value_that_asks_for_what_is_not_done_is_an_error(token: str) -> None:
    with pytest.raises(Problems) as caught:
        run_of([token])
    (problem,) = caught.value.problems
    assert problem.startswith(token.partition("=")[0])
    assert "is not supported: " in problem
