"""Conversion between scheduler_config.json of Diffusers and `ObjectiveConfig`.

Each class reads and writes the files of some Diffusers schedulers. Diffusers is not imported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from dit.config import (
    FlowPrediction,
    LevelSpacing,
    ObjectiveConfig,
    ObjectiveName,
    SamplingLevels,
    TimeShift,
)

EDM_SCHEDULER, FLOW_SCHEDULER = "EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler"
UNIPC_SCHEDULER, LCM_SCHEDULER = "UniPCMultistepScheduler", "FlowMatchLCMScheduler"
_FLOW_STEPS = 1000  # default num_train_timesteps of FlowMatchEulerDiscreteScheduler
_NOT_OURS = ("stochastic_sampling", "invert_sigmas")
"""Features of FlowMatchEulerDiscreteScheduler that no sampler of this project has."""
_SPACINGS = {f"use_{spacing}_sigmas": spacing for spacing in LevelSpacing}
_LINE_OF_MU = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
# Values that the keys of UniPCMultistepScheduler must have for the sampler `unipc`; all keys that
# are not listed must be null or false.
_UNIPC = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": _FLOW_STEPS,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
}
_OF_TRAINING = {"prediction_type", "use_flow_sigmas", "num_train_timesteps", "use_dynamic_shifting"}
"""Keys of UniPCMultistepScheduler that determine what the network learned; the others concern only
sampling."""


class SchedulerFile(BaseModel, ABC):
    """Keys of a scheduler_config.json that determine an objective, with Diffusers' defaults.

    Types are strict: 1.0 is refused as an integer, 1 as a boolean, and NaN as a number.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    class_names: ClassVar[tuple[str, ...]]
    """Scheduler classes whose files this class reads; an export writes the first."""
    states: ClassVar[tuple[str, ...]]
    """Options of ObjectiveConfig that a file determines; a missing key means Diffusers' default."""

    @classmethod
    def reader(cls, class_name: object) -> type[SchedulerFile] | None:
        """The class that reads files of the Diffusers scheduler `class_name`, or None."""
        return cls if class_name in cls.class_names else None

    def undecided(self) -> str | None:
        """Says why the file does not determine how the network was trained; None if it does."""
        return None

    def lacking(self) -> str | None:
        """Names a key of the file that no sampler of this project supports; None if there is none.

        The text is one clause for a message, which begins with "its".
        """
        return None

    def of_sampling(self) -> str | None:
        """Names a key of the file that changes sampling but not training; None if there is none."""
        return None

    @abstractmethod
    def objective(self) -> ObjectiveConfig:
        """The objective that the file describes.

        Raises:
            Problems: numbers in the file are out of range.
        """

    @classmethod
    def inexpressible(cls, _config: ObjectiveConfig, /) -> str | None:
        """The first option that the scheduler cannot express, as KEY=VALUE, or None."""
        return None

    @classmethod
    @abstractmethod
    def content(cls, config: ObjectiveConfig) -> dict[str, Any]:
        """The content of the scheduler_config.json that describes the objective `config`."""


class EdmScheduler(SchedulerFile):
    """scheduler_config.json of `EDMEulerScheduler`."""

    class_names = (EDM_SCHEDULER, "EDMDPMSolverMultistepScheduler")
    states = ("name", "sigma_min", "sigma_max", "sigma_data", "rho")

    sigma_min: PositiveFloat = 0.002
    sigma_max: PositiveFloat = 80.0
    sigma_data: PositiveFloat = 0.5
    rho: PositiveFloat = 7.0
    prediction_type: Literal["epsilon"] = "epsilon"

    def objective(self) -> ObjectiveConfig:
        options = {name: getattr(self, name) for name in self.states[1:]}
        return ObjectiveConfig(name=ObjectiveName.EDM, **options)

    @classmethod
    def content(cls, config: ObjectiveConfig) -> dict[str, Any]:
        return {
            "_class_name": EDM_SCHEDULER,
            "_diffusers_version": "0.35.0",
            "sigma_min": config.sigma_min,
            "sigma_max": config.sigma_max,
            "sigma_data": config.sigma_data,
            "sigma_schedule": "karras",
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "rho": config.rho,
            "final_sigmas_type": "zero",
        }


class FlowScheduler(SchedulerFile):
    """scheduler_config.json of `FlowMatchEulerDiscreteScheduler`."""

    class_names = (FLOW_SCHEDULER,)
    states = (
        *("name", "prediction", "flow_shift", "time_shift_type", *_LINE_OF_MU),
        *("shift_terminal", "level_spacing"),
    )

    shift: PositiveFloat = 1.0
    num_train_timesteps: PositiveInt = _FLOW_STEPS
    use_dynamic_shifting: bool | None = False
    time_shift_type: Literal["exponential", "linear"] = "exponential"
    base_shift: float | None = 0.5
    max_shift: float | None = 1.15
    base_image_seq_len: PositiveInt = 256
    max_image_seq_len: PositiveInt = 4096
    shift_terminal: float | None = None
    use_karras_sigmas: bool | None = False
    use_exponential_sigmas: bool | None = False
    use_beta_sigmas: bool | None = False
    stochastic_sampling: bool | None = False
    invert_sigmas: bool | None = False

    def undecided(self) -> str | None:
        if self.num_train_timesteps != _FLOW_STEPS:
            return f"its num_train_timesteps={self.num_train_timesteps} is not {_FLOW_STEPS}"
        unsaid = [key for key in _LINE_OF_MU if getattr(self, key) is None]
        if self.use_dynamic_shifting and unsaid:
            return f"its use_dynamic_shifting=true needs {unsaid[0]}, which is null"
        spacings = [key for key in _SPACINGS if getattr(self, key)]
        if len(spacings) > 1:
            return f"its {' and '.join(spacings)} contradict each other"
        return None

    def lacking(self) -> str | None:
        key = next((key for key in _NOT_OURS if getattr(self, key)), None)
        return key and f"its {key}=true is a feature that no sampler of this project has"

    @property
    def _spacing(self) -> LevelSpacing | None:
        return next((spacing for key, spacing in _SPACINGS.items() if getattr(self, key)), None)

    def of_sampling(self) -> str | None:
        if self._spacing is None:
            return None
        return (
            f"use_{self._spacing}_sigmas spaces the levels of samplers"
            f" (objective.level_spacing={self._spacing}); training draws t by objective.density,"
            " with the same shift"
        )

    def objective(self) -> ObjectiveConfig:
        # In Diffusers shift_terminal=0 stretches nothing, like null, and `shift` is not read with
        # use_dynamic_shifting.
        shift: dict[str, Any] = {"flow_shift": self.shift}
        if self.use_dynamic_shifting:
            shift = {key: getattr(self, key) for key in _LINE_OF_MU}
            shift["time_shift_type"] = TimeShift(self.time_shift_type)
        last = {"shift_terminal": self.shift_terminal or None, "level_spacing": self._spacing}
        return ObjectiveConfig(name=ObjectiveName.FLOW, **shift, **last)

    @classmethod
    def inexpressible(cls, config: ObjectiveConfig, /) -> str | None:
        scale, base, shift = config.timestep_scale, config.shift_base_tokens, config.time_shift_type
        if config.prediction is not FlowPrediction.VELOCITY:
            return f"objective.prediction={config.prediction}"
        if scale != _FLOW_STEPS:
            return f"objective.timestep_scale={scale:g}"
        if not (config.steps_evenly or config.sampling_levels is SamplingLevels.UNIPC):
            return f"objective.sampling_levels={config.sampling_levels}"
        if config.sampling_timesteps is not None:
            return f"objective.sampling_timesteps={list(config.sampling_timesteps)}"
        if config.sampling_levels is SamplingLevels.EMPIRICAL and shift is TimeShift.LINEAR:
            return f"objective.time_shift_type={shift}"  # pipelines ask for the exponential
        return None if base is None else f"objective.shift_base_tokens={base}"

    @classmethod
    def reader(cls, class_name: object) -> type[SchedulerFile] | None:
        others = (UnipcScheduler.reader(class_name), LcmScheduler.reader(class_name))
        return super().reader(class_name) or next(filter(None, others), None)

    @classmethod
    def content(cls, config: ObjectiveConfig) -> dict[str, Any]:
        if config.sampling_levels is SamplingLevels.UNIPC:
            return UnipcScheduler.content(config)
        content: dict[str, Any] = {
            "_class_name": FLOW_SCHEDULER,
            "_diffusers_version": "0.35.0",
            "num_train_timesteps": _FLOW_STEPS,
            "shift": config.flow_shift,
        }
        if config.sampling_levels is SamplingLevels.LCM:
            content["_class_name"] = LCM_SCHEDULER
        if (shift := config.time_shift_type) is not None:
            content |= {key: getattr(config, key) for key in _LINE_OF_MU}
        elif config.sampling_levels is SamplingLevels.EMPIRICAL:
            # Pipelines pass a mu of their own, which Diffusers accepts only with dynamic shifting.
            # A line with equal ends is the constant shift of training.
            shift, content["shift"] = TimeShift.EXPONENTIAL, 1.0
            content |= {key: getattr(config, key) for key in _LINE_OF_MU}
            content |= dict.fromkeys(("base_shift", "max_shift"), math.log(config.flow_shift))
        if shift is not None:
            content |= {"use_dynamic_shifting": True, "time_shift_type": shift.value}
        if config.shift_terminal is not None:
            content["shift_terminal"] = config.shift_terminal
        if config.level_spacing is not None:
            content[f"use_{config.level_spacing}_sigmas"] = True
        return content


class LcmScheduler(FlowScheduler):
    """scheduler_config.json of `FlowMatchLCMScheduler`, which HiDream-I1 Dev and Fast use."""

    class_names = (LCM_SCHEDULER,)
    states = (*FlowScheduler.states, "sampling_levels")

    scale_factors: list[float] | None = None

    @classmethod
    def reader(cls, class_name: object) -> type[SchedulerFile] | None:
        return cls if class_name in cls.class_names else None

    def lacking(self) -> str | None:
        if self.scale_factors:
            return (
                f"its scale_factors={self.scale_factors} enlarge latents between steps, which no"
                " sampler of this project does"
            )
        return super().lacking()

    def objective(self) -> ObjectiveConfig:
        return replace(super().objective(), sampling_levels=SamplingLevels.LCM)


class UnipcScheduler(SchedulerFile):
    """scheduler_config.json of `UniPCMultistepScheduler`, which Wan's pipelines use."""

    class_names = (UNIPC_SCHEDULER,)
    states = (*FlowScheduler.states, "sampling_levels")

    prediction_type: str = "epsilon"
    use_flow_sigmas: bool | None = False
    flow_shift: PositiveFloat = 1.0
    num_train_timesteps: PositiveInt = _FLOW_STEPS
    solver_order: int = 2
    solver_type: str = "bh2"
    predict_x0: bool = True
    lower_order_final: bool = True
    thresholding: bool = False
    final_sigmas_type: str | None = "zero"
    use_karras_sigmas: bool | None = False
    use_exponential_sigmas: bool | None = False
    use_beta_sigmas: bool | None = False
    use_dynamic_shifting: bool | None = False
    shift_terminal: float | None = None

    def undecided(self) -> str | None:
        return self._other_than_wans(_OF_TRAINING)

    def lacking(self) -> str | None:
        return self._other_than_wans({*UnipcScheduler.model_fields} - _OF_TRAINING - {"flow_shift"})

    def _other_than_wans(self, keys: set[str]) -> str | None:
        found = {key: getattr(self, key) for key in UnipcScheduler.model_fields if key in keys}
        others = (key for key, value in found.items() if (value or None) != _UNIPC.get(key))
        key = next(others, None)
        return key and (
            f"its {key}={found[key]} differs from Wan's pipelines, which have"
            f" {_UNIPC.get(key)}; no sampler of this project has it"
        )

    def objective(self) -> ObjectiveConfig:
        unipc = SamplingLevels.UNIPC
        return ObjectiveConfig(
            name=ObjectiveName.FLOW, flow_shift=self.flow_shift, sampling_levels=unipc
        )

    @classmethod
    def content(cls, config: ObjectiveConfig) -> dict[str, Any]:
        return {
            "_class_name": UNIPC_SCHEDULER,
            "_diffusers_version": "0.35.0",
            "flow_shift": config.flow_shift,
            **_UNIPC,
        }
