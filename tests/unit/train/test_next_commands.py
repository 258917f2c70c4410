"""What a finished run can be used with."""

from __future__ import annotations

import pytest

from dit.config import FlowConfig, ObjectiveConfig, ObjectiveName
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, check_expressible
from dit.train.checkpoint.resume import exportable
from tests.packs import run_config, tiny_model


def flow(**options: object) -> ObjectiveConfig:
    return ObjectiveConfig(name=ObjectiveName.FLOW, flow=FlowConfig(**options))


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
            run_config(objective=ObjectiveConfig(flow=FlowConfig(timestep_scale=1.0))),
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
