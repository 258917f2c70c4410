"""From a pipeline's folder and its noise we generate what it does, and it comes back whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dit.config import Weights
from dit.convert.export import ExportOptions, export_weights
from dit.convert.verify import compare_forward, compare_tensors
from tests.families.case import gap
from tests.families.generation import noise_of, opened, ours, texts_of
from tests.families.table import GENERATIONS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if case.slow else [])
        for name, case in GENERATIONS.items()
    ],
)
def test_pictures_of_texts_and_the_way_back(groups, tmp_path: Path, name: str) -> None:
    """Import, texts, pictures with and without guidance, verify, export."""
    case, source = GENERATIONS[name], tmp_path / "pipeline"
    pipe = case.pipeline(tmp_path)
    scheduler = dict(pipe.scheduler.config)
    run = opened(tmp_path, away=case.away)
    objective = run.config.objective
    for key, value in case.objective.items():
        found = getattr(objective, key)
        assert found == value, key
    texts = texts_of(run, case.prompt, case.negative)
    for rows, theirs in case.encoded(pipe, texts):
        assert rows.shape == theirs.shape
        assert gap(rows.float(), theirs.float()) <= 0.05  # bfloat16
    start, made = noise_of(case.size, case.channels), []
    for call, options in case.calls:
        if "guider" in options:
            options = {**options, "guider": str(tmp_path / options["guider"])}
        theirs = case.made_by(pipe, start, texts, **call)
        told = {"negative_prompt": case.negative, **case.options, **options}
        made.append(ours(run, start, case.prompt, **told))
        assert gap(made[-1], theirs) <= 1e-4
    assert min(gap(one, made[0]) for one in made[1:]) > 1e-2

    tensors, _ = compare_tensors(source, run.path, Weights.MODEL)
    forward = compare_forward(source, run.path, Weights.MODEL)
    assert tensors.different == 0 and forward.largest <= 1e-4 * forward.scale
    export_weights(run.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = type(pipe).from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    weights = again.transformer.state_dict()
    assert all(torch.equal(weights[n], x) for n, x in pipe.transformer.state_dict().items())
    for key, value in scheduler.items():
        of_lengths = scheduler.get("use_dynamic_shifting") and key == "shift"  # not read then
        if ("shift" in key or "seq_len" in key) and not of_lengths:
            assert again.scheduler.config[key] == value, key
