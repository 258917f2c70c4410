"""A folder as OmniGen2 is published in: imported with its levels, exported with its code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from dit.config import SamplingLevels
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from tests.families import pipeline_parts
from tests.families.omnigen2 import random_omnigen2

INDEX = {
    "_class_name": "OmniGen2Pipeline",
    "mllm": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "processor": ["transformers", "Qwen2_5_VLProcessor"],
    "scheduler": ["scheduling_of_its_own", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["transformer_omnigen2", "OmniGen2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "dynamic_time_shift": True,
    "num_train_timesteps": 1000,
}


def test_its_folder_comes_back_whole(groups, tmp_path: Path) -> None:
    source, back = pipeline_parts.omnigen2(tmp_path / "pipeline"), tmp_path / "back"
    random_omnigen2(text_feat_dim=16).save_pretrained(source / "transformer")
    (source / "scheduler").mkdir()
    (source / "scheduler/scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (source / "model_index.json").write_text(json.dumps(INDEX))
    for code in ("transformer/transformer_omnigen2.py", "scheduler/scheduling_of_its_own.py"):
        (source / code).write_text("# its class")
    run = import_weights(source, tmp_path / "ours")
    told = run.config.objective
    assert (told.shift_base_tokens, told.flow_shift) == (400, 1.0)
    assert told.sampling_levels is SamplingLevels.EVEN
    export_weights(run.path, back, ExportOptions(pipeline_from=source))
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()} >= names
    for name in names - {"transformer/config.json"}:
        if "transformer/" not in name or name.endswith(".py"):
            assert (back / name).read_bytes() == (source / name).read_bytes(), name
    (file,) = (back / "transformer").glob("*.safetensors")
    weights = load_file(file)
    for key, value in random_omnigen2().state_dict().items():
        assert torch.equal(weights[key], value)
