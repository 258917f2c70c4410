"""What a run trains, by its keys and by the checkpoint that it starts from."""

from __future__ import annotations

import pytest

from dit.config import LoraConfig
from dit.models.lora.adapter import AdapterShape
from dit.train.checkpoint.adapters import (
    ADAPTERS,
    AdapterRun,
    FrozenBase,
    adapter_run,
    adapters_of,
)
from dit.train.checkpoint.paths import CheckpointError
from tests.packs import run_config

RUN = AdapterRun(
    adapters={"transformer_blocks.0.attn1.to_q": AdapterShape(rank=2, alpha=3.0)},
    base=FrozenBase(),
)


def test_a_checkpoint_of_adapters_says_what_they_are(tmp_path):
    assert adapters_of(tmp_path) is None
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    assert adapters_of(tmp_path) == RUN
    assert adapter_run(run_config(lora=LoraConfig(rank=2)), tmp_path) == RUN


def test_adapters_alone_are_no_weights_to_train(tmp_path):
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    with pytest.raises(CheckpointError, match="holds LoRA adapters and no weights"):
        adapter_run(run_config(), tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"base": 1, "adapters": {}}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / ADAPTERS).write_text(content)
    with pytest.raises(CheckpointError, match=ADAPTERS):
        adapters_of(tmp_path)
