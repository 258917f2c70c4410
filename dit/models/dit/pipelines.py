"""Diffusers' pipelines that run the DiT, and the inputs that they give the network."""

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
    """A pipeline that runs the DiT; the arguments say which inputs it gives the network.

    `fills_up_text` says that captions are padded with zeros, not by the encoder; `gives_frames`,
    that there may be given frames; `tells_fps`, whether the network gets a frame rate (None: the
    pipeline is for images); `conditions_text`, that captions pass Anima's conditioner. `sampling`
    is that of `Pipeline`; by default EDM with the scheduler's options.
    """
    conditioner = TextConditioner.STORED if conditions_text else TextConditioner.NONE

    def rules(model: DitConfig) -> list[Rule]:
        padded, fps, given = model.text_pad_to, model.base_fps, model.condition_mask
        return [
            (
                not fills_up_text or padded is not None,
                f"model.text_pad_to=null, and {name} fills captions up with zeros",
            ),
            (
                fills_up_text or padded is None,
                f"model.text_pad_to={padded}, and {name} fills captions up with states of its"
                " encoder",
            ),
            (gives_frames or not given, f"model.condition_mask=true, and {name} gives no frames"),
            (not gives_frames or given, f"model.condition_mask=false, and {name} gives frames"),
            (
                tells_fps is not False or fps is None,
                f"model.base_fps={fps}, and {name} tells no frames per second",
            ),
            (
                not tells_fps or fps is not None,
                f"model.base_fps=null, and {name} tells frames per second",
            ),
            (
                conditions_text == model.conditions_text,
                f"model.text_conditioner={model.text_conditioner}, and {name} has"
                f" {'one' if conditions_text else 'none'}",
            ),
        ]

    told: Any = {"settings": {"text_conditioner": conditioner}, "rules": rules}
    if sampling is None:
        return Pipeline(samples="edm", **told)
    if conditions_text:
        told["modular"], told["scheduler"] = True, lambda objective: {"shift": objective.flow_shift}
    return Pipeline(objective=PREDICT2_OBJECTIVE, sampling=sampling, **told)


def _levels_of_predict2(_: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options that Predict2's pipelines use, whatever their scheduler's file says."""
    return {"sampling_levels": "karras_to_sigma_min", "sigma_min": 0.002, "sigma_max": 80.0}


def _levels_of_predict2_5(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    if not scheduler.get("use_karras_sigmas"):
        return {"flow_shift": scheduler.get("flow_shift", 1.0)}
    ends = {key: scheduler.get(key) for key in ("sigma_min", "sigma_max")}
    return {"sampling_levels": "karras", **{k: v for k, v in ends.items() if v is not None}}


def _levels_of_anima(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options of Anima: even steps from 1 to 1 / number of steps, shifted.

    If there is no scheduler's file beside the transformer, the published shift is used.
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
