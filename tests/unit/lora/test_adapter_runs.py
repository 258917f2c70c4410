"""What a run trains, by its keys and by the checkpoint that it starts from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dit.checkpoint_paths import ADAPTERS, CheckpointError
from dit.config import LoraConfig
from dit.config_loading import save_config
from dit.lora.adapter import AdapterShape
from dit.lora.checkpoint import DRAWN, AdapterRun, adapter_run, adapters_of
from dit.lora.factors import LoraFileError, linear_shapes
from dit.train.checkpoint.adapters import load_adapted
from tests.lora_files import random_factors
from tests.packs import run_config

RUN = AdapterRun(
    adapters={"transformer_blocks.0.attn1.to_q": AdapterShape(rank=2, alpha=3.0)},
    base=DRAWN,
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
        load_adapted(tmp_path, nn.Linear(1, 1), None, averaged=False, read_folder=None)


def test_adapters_alone_are_no_weights_to_train(tmp_path):
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    with pytest.raises(CheckpointError, match="holds LoRA adapters and no weights"):
        adapter_run(run_config(), tmp_path)


def test_keys_of_text_encoders_are_left_out_where_the_run_says_so(tmp_path):
    config = run_config()
    name, (outputs, inputs) = next(iter(linear_shapes(config.model).items()))
    one = random_factors({name: (outputs, inputs)})[name]
    file = tmp_path / "x.safetensors"
    tensors = {f"{name}.lora_A.weight": one.down, f"{name}.lora_B.weight": one.up}
    save_file(tensors | {"text_encoder.m.lora_A.weight": torch.ones(2, 2)}, file)
    dataset = replace(config.dataset, mock=True)  # adapters beside weights of a seed
    lora = LoraConfig(init_from=str(file))
    with pytest.raises(LoraFileError, match=r"lora\.ignore_text_encoder=true"):
        adapter_run(replace(config, dataset=dataset, lora=lora), None)
    said: list[str] = []
    lora = replace(lora, ignore_text_encoder=True)
    found = adapter_run(replace(config, dataset=dataset, lora=lora), None, said.append)
    assert found is not None and list(found.adapters) == [name]
    assert [line for line in said if "1 of 3 keys are of text encoders" in line] == said != []


BASE = '{"path": null, "averaged": false, "digest": ""}'
DAMAGED = {
    "empty": "",
    "no keys": "{}",
    "base": '{"base": 1, "adapters": {}}',
    "half a base": '{"base": {"path": null}, "adapters": {}}',
    "key": f'{{"base": {BASE}, "adapters": {{}}, "more": 1}}',
    "rank": f'{{"base": {BASE}, "adapters": {{"a": {{"rank": 0, "alpha": 1.0}}}}}}',
    "alpha": f'{{"base": {BASE}, "adapters": {{"a": {{"rank": 1, "alpha": Infinity}}}}}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / ADAPTERS).write_text(content)
    with pytest.raises(CheckpointError, match=ADAPTERS):
        adapters_of(tmp_path)
    (tmp_path / ADAPTERS).write_text(f'{{"base": {BASE}, "adapters": {{}}}}')
    assert adapters_of(tmp_path) == AdapterRun(base=DRAWN, adapters={})
