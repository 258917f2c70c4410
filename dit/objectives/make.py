"""The choice of the objective."""

from __future__ import annotations

from dit.config import ObjectiveConfig, ObjectiveName
from dit.objectives.edm import Edm
from dit.objectives.flow_matching import Flow
from dit.objectives.objective import Objective


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config.name` names."""
    match config.name:
        case ObjectiveName.EDM:
            return Edm(config)
        case ObjectiveName.FLOW:
            return Flow(config)
