"""What a finished run can be used with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dit.config import EmaConfig, EmaKind, LoraConfig, ObjectiveConfig, ObjectiveName
from dit.config.objective import SamplingLevels
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, check_expressible
from dit.train.checkpoint import saving
from dit.train.checkpoint.saving import exportable
from tests.families.wan import wan_model
from tests.packs import run_config, tiny_model

QUADRATIC = SamplingLevels.LINEAR_QUADRATIC


def flow(**options: object) -> ObjectiveConfig:
    return ObjectiveConfig(name=ObjectiveName.FLOW, **options)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (run_config(), True),
        (run_config(model=tiny_model(base_fps=30.0)), False),
        (run_config(objective=flow(flow_shift=3.0)), True),
        (
            run_config(objective=flow(timestep_scale=1.0)),
            False,
        ),
        (
            run_config(objective=flow(shift_base_tokens=256)),
            False,
        ),
        (
            run_config(objective=ObjectiveConfig(timestep_scale=1.0)),
            True,
        ),  # unused by EDM
    ],
)
def test_export_is_offered_where_the_converter_accepts_the_run(config, expected):
    assert exportable(config) == expected
    try:
        check_expressible(config, ExportOptions())
        accepted = True
    except ConvertError:
        accepted = False
    assert accepted == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (run_config(), ("diffusers", "export ")),
        (run_config(lora=LoraConfig(rank=4)), ("lora", "export-lora ")),
        (
            run_config(lora=LoraConfig(rank=4), objective=flow(sampling_levels=QUADRATIC)),
            ("export-lora ",),
        ),
        (
            run_config(model=wan_model("i2v")),
            (" --image first.png\n",),
        ),
        (run_config(model=wan_model("flf2v")), ("--image first.png --last_image last.png\n",)),
        (run_config(ema=EmaConfig(kind=EmaKind.NONE)), ("--weights model --output_dir", "export ")),
    ],
)
def test_commands_fit_what_the_run_has_kept(config, words, tmp_path, monkeypatch):
    (tmp_path / "dataset_card.json").touch()
    monkeypatch.setattr(saving, "find_checkpoint", lambda _: tmp_path)
    data = replace(config.dataset, mock=False, path="data")
    save = replace(config.checkpoint, save=str(tmp_path))
    said = saving.next_commands(replace(config, dataset=data, checkpoint=save))
    assert all(word in said for word in words)
