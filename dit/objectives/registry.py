"""The parts of an objective by `objective.name`, so that no other code compares names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from dit.config import OBJECTIVES, ObjectiveConfig, Problems

if TYPE_CHECKING:
    from dit.objectives.diffusers_schedulers import SchedulerFile
    from dit.objectives.objective import SamplingPath, TrainingObjective

# Import paths, resolved at first use, so that a run imports only its own objective.
_EDM = "dit.objectives.edm:Edm"
_FLOW = "dit.objectives.flow_matching:FlowMatching"
_SCHEDULERS = "dit.objectives.diffusers_schedulers"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveParts:
    """The classes that implement an objective; one without sampling has only `training`."""

    training: Callable[[ObjectiveConfig], TrainingObjective]
    sampling: Callable[[ObjectiveConfig], SamplingPath] | None = None
    """Makes the sampling side. If None, nothing can be generated, and a run that would sample is
    refused."""
    scheduler: Callable[[], type[SchedulerFile]] | None = None
    """Returns the class that reads and writes the objective's scheduler_config.json; needed only
    for conversion. If None, only the weights can be exported."""


REGISTRY: dict[str, ObjectiveParts] = {
    "edm": ObjectiveParts(
        training=lambda config: resolve_name(_EDM)(config),
        sampling=lambda config: resolve_name(_EDM)(config),
        scheduler=partial(resolve_name, f"{_SCHEDULERS}:EdmScheduler"),
    ),
    "flow": ObjectiveParts(
        training=lambda config: resolve_name(_FLOW)(config),
        sampling=lambda config: resolve_name(_FLOW)(config, config),
        scheduler=partial(resolve_name, f"{_SCHEDULERS}:FlowScheduler"),
    ),
}


def register(
    name: str, parts: ObjectiveParts, *, summary: Callable[[ObjectiveConfig], str]
) -> None:
    """Adds an objective that is defined elsewhere, to be selected by `objective.name=NAME`.

    `summary` returns its options in one line, for `--dry-run`.

    Raises:
        ValueError: the name is taken.
    """
    if name in OBJECTIVES:
        raise ValueError(f"an objective called {name} is registered already; choose another name")
    OBJECTIVES[name], REGISTRY[name] = summary, parts


def training_objective(config: ObjectiveConfig) -> TrainingObjective:
    """The training side of the objective that `config.name` names."""
    return REGISTRY[config.name].training(config)


def check_covers_all_levels(config: ObjectiveConfig) -> None:
    """Refuses generation by a single network that was trained on a part of the levels.

    Raises:
        Problems: `level_range` excludes levels that a sampler visits.
    """
    if not config.covers_all_levels:
        raise Problems(
            [
                f"objective.level_range={list(config.level_range or ())}: the network is the"
                " expert of these noise levels and was never trained on the others, which a sampler"
                " visits, too; generate with the checkpoints of both experts (--checkpoint_path and"
                " --checkpoint_path_low)"
            ]
        )


def sampling_path(config: ObjectiveConfig) -> SamplingPath:
    """The sampling side of the objective that `config.name` names.

    Raises:
        Problems: the objective has no sampling side.
    """
    make = REGISTRY[config.name].sampling
    if make is None:
        raise Problems(
            [
                f"objective.name={config.name} has no sampling path, so nothing can be generated"
                " with it: register one (dit.objectives.registry), and train without"
                " validation.prompts_file and validation.num_captions until then"
            ]
        )
    return make(config)
