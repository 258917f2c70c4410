"""The pipelines of Diffusers that run a Cosmos network, and what each of them feeds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dit.models.dit.config import PREDICT2_OBJECTIVE, DitConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pipeline:
    """What a pipeline does by itself, whatever its scheduler says."""

    objective: Mapping[str, Any]
    """Keys of `objective`."""
    fills_up_text: bool = True
    """With zeros; otherwise with the states that the encoder has for padding."""
    gives_frames: bool = False
    tells_fps: bool | None = None
    """Frames per second; None: it makes images, for which they do not matter."""


_COSMOS = {
    "CosmosTextToWorldPipeline": _Pipeline(objective={"name": "edm"}, tells_fps=True),
    "Cosmos2TextToImagePipeline": _Pipeline(objective=PREDICT2_OBJECTIVE),
    "Cosmos2VideoToWorldPipeline": _Pipeline(
        objective=PREDICT2_OBJECTIVE, gives_frames=True, tells_fps=True
    ),
    "Cosmos2_5_PredictBasePipeline": _Pipeline(
        objective=PREDICT2_OBJECTIVE, gives_frames=True, fills_up_text=False, tells_fps=False
    ),
}
PIPELINES: Mapping[str, str] = {name: one.objective["name"] for name, one in _COSMOS.items()}
OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    # The first leaves its options to its scheduler.
    name: one.objective
    for name, one in _COSMOS.items()
    if len(one.objective) > 1
}


def sampling_settings(pipeline: str, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `objective` that say which levels a pipeline visits, of its scheduler_config.json."""
    if pipeline != "Cosmos2_5_PredictBasePipeline":
        # Those of Predict2 write these numbers into their schedulers, whatever stood there.
        return {"sampling_levels": "karras_to_sigma_min", "sigma_min": 0.002, "sigma_max": 80.0}
    if not scheduler.get("use_karras_sigmas"):
        return {"flow_shift": scheduler.get("flow_shift", 1.0)}
    ends = {key: scheduler.get(key) for key in ("sigma_min", "sigma_max")}
    return {"sampling_levels": "karras", **{k: v for k, v in ends.items() if v is not None}}


def pipeline_misfits(model: DitConfig, pipeline: str) -> list[str]:
    """What of a network the pipeline would run on other inputs than it was trained on."""
    known = _COSMOS[pipeline]
    rules = [
        (
            not known.fills_up_text or model.text_pad_to is not None,
            f"model.text_pad_to=null, and {pipeline} fills captions up with zeros",
        ),
        (
            known.fills_up_text or model.text_pad_to is None,
            f"model.text_pad_to={model.text_pad_to}, and {pipeline} fills captions up with states"
            " of its encoder",
        ),
        (
            known.gives_frames or not model.condition_mask,
            f"model.condition_mask=true, and {pipeline} gives no frames",
        ),
        (
            not known.gives_frames or model.condition_mask,
            f"model.condition_mask=false, and {pipeline} gives frames",
        ),
        (
            known.tells_fps is not False or model.base_fps is None,
            f"model.base_fps={model.base_fps}, and {pipeline} tells no frames per second",
        ),
        (
            not known.tells_fps or model.base_fps is not None,
            f"model.base_fps=null, and {pipeline} tells frames per second",
        ),
    ]
    return [message for holds, message in rules if not holds]
