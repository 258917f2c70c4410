"""Where every gradient is exactly zero: mock runs of adapters, and what a run says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dit.config import LoraConfig, MockGeometry
from dit.config_loading import load_config
from dit.models.registry import families
from dit.train.model_and_optimizer import initialise_weights
from dit.train.trainer import pretrain
from tests.launching import metrics
from tests.learning import tiny_run
from tests.packs import run_config


def _grad_norms(folder: Path, *overrides: str) -> list[float]:
    """Of two steps on mock data."""
    mock = replace(
        tiny_run().dataset, mock_samples=(MockGeometry(height=8, width=8, text_length=3),)
    )
    keys = (
        *("train.train_iters=2", "train.global_batch_size=1", "train.eval_interval=0"),
        *("dataset.task_encoder_seq_length=64", f"checkpoint.save={folder}"),
    )
    config = load_config(replace(tiny_run(), dataset=mock), overrides=[*keys, *overrides])
    assert pretrain(config) == 0
    return [line["grad_norm"] for line in metrics(folder)]


def test_adapters_of_a_mock_run_have_gradients(groups, tmp_path, capsys):
    """Their frozen weights are in no file, and are drawn: a head of zeros would stay zero."""
    assert all(_grad_norms(tmp_path, "lora.rank=3"))
    assert "exactly zero" not in capsys.readouterr().out


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_no_frozen_matrix_of_a_mock_run_is_zero(groups, family):
    """Those that start at zero in a run of all weights are heads, and gates of layers."""
    size, keys = next(iter(family.tiny.items()))
    model = family.config(**{**family.sizes[size], **keys, "name": "custom"})
    network = family.network()(model, groups)
    initialise_weights(network, replace(run_config(model=model), lora=LoraConfig(rank=3)))
    for name, weight in network.named_parameters():
        assert weight.any() or weight.dim() == 1, name


def test_a_step_without_any_gradient_is_said_once(groups, tmp_path, capsys):
    frozen = 'optimizer.groups=[{pattern: "*proj_out*", frozen: true}]'
    assert _grad_norms(tmp_path, frozen, "logger.log_interval=2") == [0, 0]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "exactly zero" in line]
    assert line.startswith("step 1: every gradient is exactly zero")
    assert "checkpoint.load_hf" in line and "freeze less (optimizer.groups)" in line
