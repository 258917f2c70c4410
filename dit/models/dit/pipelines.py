"""Diffusers' pipelines that run the DiT, and the inputs that they pass to the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dit.config.checks import Rule
from dit.models.diffusers.form import Pipeline
from dit.models.dit.family import (
    OBJECTIVES_OF_SIZES,
    PREDICT2_OBJECTIVE,
    DitConfig,
    TextConditioner,
)


def _pipeline(
    name: str,
    *,
    fills_up_text: bool = True,
    gives_frames: bool = False,
    tells_fps: bool | None = None,
    conditions_text: bool = False,
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
) -> Pipeline:
    """The description of a pipeline that runs the DiT, from the inputs that its network gets.

    `fills_up_text`: captions are padded with zeros, not with the encoder's states of padding.
    `gives_frames`: the first frames may be given. `tells_fps`: the network gets a frame rate (None:
    the pipeline generates images). `conditions_text`: captions pass Anima's conditioner. `sampling`
    is `Pipeline.sampling` of a flow-matching pipeline; None stands for a pipeline of EDM.
    """
    conditioner = TextConditioner.STORED if conditions_text else TextConditioner.NONE

    def rules(model: DitConfig) -> list[Rule]:
        padded, fps, given = model.text_pad_to, model.base_fps, model.condition_mask
        return [
            (
                not fills_up_text or padded is not None,
                f"model.text_pad_to=null, but {name} pads captions with zeros",
            ),
            (
                fills_up_text or padded is None,
                f"model.text_pad_to={padded}, but {name} pads captions with its encoder's states"
                " of padding",
            ),
            (
                gives_frames or not given,
                f"model.condition_mask=true, but {name} passes no given frames to the network",
            ),
            (
                not gives_frames or given,
                f"model.condition_mask=false, but {name} passes given frames to the network",
            ),
            (
                tells_fps is not False or fps is None,
                f"model.base_fps={fps}, but {name} passes no frame rate to the network",
            ),
            (
                not tells_fps or fps is not None,
                f"model.base_fps=null, but {name} passes a frame rate to the network",
            ),
            (
                conditions_text == model.conditions_text,
                f"model.text_conditioner={model.text_conditioner}, but {name} has"
                f" {'a' if conditions_text else 'no'} conditioner",
            ),
        ]

    told: Any = {"settings": {"text_conditioner": conditioner}, "rules": rules}
    if sampling is None:
        return Pipeline(samples="edm", **told)
    if conditions_text:
        told["modular"], told["scheduler"] = True, lambda objective: {"shift": objective.flow_shift}
    return Pipeline(objective=PREDICT2_OBJECTIVE, sampling=sampling, **told)


def _levels_of_predict2(_: Mapping[str, Any]) -> dict[str, Any]:
    """The noise levels that Predict2's pipelines use, whatever their scheduler_config.json says."""
    return {"sampling_levels": "karras_to_sigma_min", "sigma_min": 0.002, "sigma_max": 80.0}


def _levels_of_predict2_5(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    if not scheduler.get("use_karras_sigmas"):
        return {"flow_shift": scheduler.get("flow_shift", 1.0)}
    ends = {key: scheduler.get(key) for key in ("sigma_min", "sigma_max")}
    return {"sampling_levels": "karras", **{k: v for k, v in ends.items() if v is not None}}


def _levels_of_anima(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options of Anima's pipeline: even steps with a shift.

    The shift is that of `scheduler`, the content of scheduler_config.json; without this file it is
    the published one.
    """
    of_size = OBJECTIVES_OF_SIZES["anima"]
    return dict(of_size) | ({"flow_shift": scheduler.get("shift", 1.0)} if scheduler else {})


_OPTIONS: dict[str, dict[str, Any]] = {
    "CosmosTextToWorldPipeline": {"tells_fps": True},
    "Cosmos2TextToImagePipeline": {"sampling": _levels_of_predict2},
    "Cosmos2VideoToWorldPipeline": {
        "gives_frames": True,
        "tells_fps": True,
        "sampling": _levels_of_predict2,
    },
    "Cosmos2_5_PredictBasePipeline": {
        "gives_frames": True,
        "fills_up_text": False,
        "tells_fps": False,
        "sampling": _levels_of_predict2_5,
    },
    "AnimaModularPipeline": {"conditions_text": True, "sampling": _levels_of_anima},
}
PIPELINES = {name: _pipeline(name, **options) for name, options in _OPTIONS.items()}
"""Pipelines that run the DiT, by class name."""
