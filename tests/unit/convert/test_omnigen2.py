"""A folder as OmniGen2 is published in: imported with its levels, exported with its code."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from dit.config import SamplingLevels, Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from tests.families.omnigen2 import SCHEDULER, pipeline, random_omnigen2


def test_its_folder_comes_back_whole(groups, tmp_path: Path) -> None:
    source, back = pipeline(tmp_path), tmp_path / "back"
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


def test_a_scheduler_that_does_not_shift(groups, tmp_path: Path) -> None:
    """The levels of its folder are those of a run, and an export into another folder is refused."""
    source = pipeline(tmp_path)
    file = source / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(SCHEDULER | {"dynamic_time_shift": False}))
    run = import_weights(source, tmp_path / "ours")
    assert run.config.objective.shift_base_tokens is None
    options = ExportOptions(pipeline_from=source)
    export_weights(run.path, tmp_path / "back", options)
    file.write_text(json.dumps(SCHEDULER))
    with pytest.raises(ConvertError, match="shift_base_tokens=None, and OmniGen2Pipeline has 400"):
        export_weights(run.path, tmp_path / "other", options)


def test_outputs_are_not_compared_without_a_class(groups, tmp_path: Path, monkeypatch) -> None:
    source = pipeline(tmp_path)
    run = import_weights(source, tmp_path / "ours")
    tensors, chosen = compare_tensors(source, run.path, None)
    assert tensors.count > 0 and not tensors.different and chosen is Weights.MODEL
    monkeypatch.delattr(diffusers, "OmniGen2Transformer2DModel")
    with pytest.raises(ConvertError, match=r"OmniGen2Transformer2DModel; .* --tensors-only"):
        compare_forward(source, run.path, chosen)
