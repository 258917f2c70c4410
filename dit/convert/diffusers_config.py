"""config.json and scheduler_config.json of Diffusers <-> our configuration.

What one side has and the other cannot express is an error that names it. What Diffusers has no
place for and does not need is kept in config.json under a private key, which it ignores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dit.config import (
    CUSTOM_SIZE,
    ModelConfig,
    ObjectiveConfig,
    ObjectiveName,
    Precision,
    RunConfig,
)
from dit.config.loading import default_config, load_config
from dit.convert.diffusers_json import (
    OUR_KEY,
    EdmScheduler,
    FlowScheduler,
    PrivateKeys,
    checked_json,
)
from dit.convert.errors import ConvertError, listed
from dit.models.family import diffusers_families, family_of

EDM_SCHEDULER, FLOW_SCHEDULER = "EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler"
EDM_SCHEDULERS = (EDM_SCHEDULER, "EDMDPMSolverMultistepScheduler")
_FLOW_STEPS = 1000  # num_train_timesteps of FlowMatchEulerDiscreteScheduler
# With these a pipeline computes levels and preconditioning itself (Cosmos 2), or shifts them.
_OWN_LEVELS = ("use_karras_sigmas", "use_dynamic_shifting", "invert_sigmas")


class Unsaid(Enum):
    """The user says nothing of a setting, so that the family decides."""

    UNSAID = "unsaid"


def model_config(
    content: dict[str, Any],
    *,
    precision: Precision,
    text_pad_to: int | Unsaid | None = Unsaid.UNSAID,
    place: object,
) -> ModelConfig:
    """Our model of a config.json; `text_pad_to` is for weights that were not exported by us.

    Raises:
        ConvertError: it is of another class, or has what our model has not; lists everything.
    """
    known = diffusers_families()
    family = known.get(str(content.get("_class_name")))
    if family is None:
        raise ConvertError(
            f"{place} is of class {content.get('_class_name')!r}; only {listed(known)} can be"
            " imported"
        )
    form = family.diffusers()
    private = checked_json(PrivateKeys, content, place=place)
    unused = private.use_default_values
    given = {k: v for k, v in content.items() if not k.startswith("_") and k not in unused}
    keys = checked_json(form.config_keys, given, place=place)
    unknown = [f"unknown keys {listed(keys.model_extra)}"] if keys.model_extra else []
    if wrong := [*unknown, *form.unsupported(keys)]:
        raise ConvertError(f"{place} describes a model that cannot be imported: {'; '.join(wrong)}")
    ours = None
    if private.ours is not None:
        ours = checked_json(form.private_keys, private.ours, place=place, within=OUR_KEY)
    text = form.text_pad_to if isinstance(text_pad_to, Unsaid) else text_pad_to
    try:
        settings = form.settings(keys, ours, text)
        return family.config(name=CUSTOM_SIZE, precision=precision, **settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConvertError(f"{place} describes no model that can be trained: {error}") from error


def diffusers_transformer_config(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's model.

    Raises:
        ConvertError: Diffusers cannot express the model.
    """
    form = family_of(config.model).diffusers()
    if wrong := form.inexpressible(config):
        raise ConvertError("; ".join(wrong))
    return {
        "_class_name": form.class_name,
        "_diffusers_version": "0.35.0",
        OUR_KEY: form.private(config.model),
        **form.content(config),
    }


def scheduler_config(objective: ObjectiveConfig) -> dict[str, Any]:
    """scheduler_config.json with the noise range of a run, and the levels that our samplers use.

    Raises:
        ConvertError: Diffusers' schedulers cannot express the objective.
    """
    o = objective
    if o.name is ObjectiveName.EDM:
        return {
            "_class_name": EDM_SCHEDULER,
            "_diffusers_version": "0.35.0",
            "sigma_min": o.sigma_min,
            "sigma_max": o.sigma_max,
            "sigma_data": o.sigma_data,
            "sigma_schedule": "karras",
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "rho": o.rho,
            "final_sigmas_type": "zero",
        }
    remedy = f"{FLOW_SCHEDULER} cannot express it; --no-scheduler exports the weights alone"
    if o.timestep_scale != _FLOW_STEPS:
        raise ConvertError(f"objective.timestep_scale={o.timestep_scale:g}: {remedy}")
    if o.shift_base_tokens is not None:
        raise ConvertError(f"objective.shift_base_tokens={o.shift_base_tokens}: {remedy}")
    return {
        "_class_name": FLOW_SCHEDULER,
        "_diffusers_version": "0.35.0",
        "num_train_timesteps": _FLOW_STEPS,
        "shift": o.flow_shift,
    }


@dataclass(frozen=True, slots=True)
class FoundObjective:
    """What a scheduler says of training."""

    objective: ObjectiveConfig
    note: str


def objective_config(
    content: dict[str, Any] | None, *, place: object, given: Sequence[str] = ()
) -> FoundObjective:
    """The objective of a scheduler_config.json, with the settings `given` by the user on top.

    The default objective where there is no scheduler. `given` are words such as
    `objective.name=flow`; with that one any scheduler will do.

    Raises:
        ConvertError: the scheduler does not say what the network was trained for, or asks for what
            no objective here is; names the file and the remedy.
        ConfigError: `given` is not understood.
    """
    if other := [word for word in given if not word.lstrip("+-~").startswith("objective.")]:
        raise ConvertError(f"{other[0]!r} is not understood; only objective.KEY=VALUE can be set")
    told = any(word.lstrip("+-").startswith("objective.name") for word in given)
    if content is None:
        found = FoundObjective(
            ObjectiveConfig(),
            "the default, since there is no scheduler_config.json; set objective.* to what they"
            " were trained with",
        )
    else:
        found = _of_scheduler(content, place, told=told)
    if not given:
        return found
    config = load_config(replace(default_config(), objective=found.objective), overrides=given)
    return FoundObjective(config.objective, f"with {' '.join(given)}, as given")


def _of_scheduler(content: dict[str, Any], place: object, *, told: bool) -> FoundObjective:
    """What a scheduler says; the default where it does not and the user has `told`."""
    name = content.get("_class_name")
    ask = "say what the weights were trained for: objective.name=edm or objective.name=flow"
    if name in EDM_SCHEDULERS:
        edm = checked_json(EdmScheduler, content, place=place)
        known = {key: getattr(edm, key) for key in ("sigma_min", "sigma_max", "sigma_data", "rho")}
        return FoundObjective(_objective(place, name=ObjectiveName.EDM, **known), f"of {name}")
    if name == FLOW_SCHEDULER:
        flow = checked_json(FlowScheduler, content, place=place)
        own = [key for key in _OWN_LEVELS if getattr(flow, key)]
        if not own:
            steps, shift = float(flow.num_train_timesteps), flow.shift
            config = _objective(
                place, name=ObjectiveName.FLOW, flow_shift=shift, timestep_scale=steps
            )
            return FoundObjective(config, f"of {name}")
        ask = f"its {own[0]} leaves the levels to a pipeline; {ask}"
    if not told:
        raise ConvertError(
            f"{place} is of class {name!r}, which does not tell the objective; {ask}"
        )
    return FoundObjective(ObjectiveConfig(), "")


def _objective(place: object, **settings: Any) -> ObjectiveConfig:
    try:
        return ObjectiveConfig(**settings)
    except ValueError as error:
        raise ConvertError(f"{place} describes no objective: {error}") from error
