"""What a run trains, by its keys and by the checkpoint that it starts from."""

from __future__ import annotations

import pytest
from torch import nn

from dit.config import LoraConfig
from dit.config.loading import save_config
from dit.models.lora.adapter import AdapterShape
from dit.train.checkpoint.adapters import (
    ADAPTERS,
    AdapterRun,
    FrozenBase,
    adapter_run,
    adapters_of,
)
from dit.train.checkpoint.paths import CheckpointError
from dit.train.checkpoint.state_dict import load_network
from tests.packs import run_config

RUN = AdapterRun(
    adapters={"transformer_blocks.0.attn1.to_q": AdapterShape(rank=2, alpha=3.0)},
    base=FrozenBase(),
)


def test_a_checkpoint_of_adapters_says_what_they_are(tmp_path):
    assert adapters_of(tmp_path) is None
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    assert adapters_of(tmp_path) == RUN
    config = run_config(lora=LoraConfig(rank=2))
    save_config(config, tmp_path / "config.yaml")
    assert adapter_run(config, tmp_path) == RUN


def test_weights_that_are_in_no_file_show_nothing(tmp_path):
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    with pytest.raises(CheckpointError, match="are in no file: they show nothing"):
        load_network(tmp_path, nn.Linear(1, 1), None, averaged=False)


def test_adapters_alone_are_no_weights_to_train(tmp_path):
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    with pytest.raises(CheckpointError, match="holds LoRA adapters and no weights"):
        adapter_run(run_config(), tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"base": 1, "adapters": {}}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / ADAPTERS).write_text(content)
    with pytest.raises(CheckpointError, match=ADAPTERS):
        adapters_of(tmp_path)
