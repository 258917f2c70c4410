"""What the family `hunyuan_video` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import Any

from dit.models.family import Family, InputKind, ObjectiveConventions, SampleInput, WeightRules
from dit.models.hunyuan_video.config import TINY, FirstFrame, HunyuanVideoConfig
from dit.models.joint.layers import (
    ADALN_ZERO,
    JOINT_PARTS,
    double_then_single,
    grid_positions,
    joint_head_cost,
)
from dit.models.layer_spec import NetworkCost, condition_cost, refiner_cost, replicated
from dit.models.registry import imported

POOLED, FIRST_FRAME = "pooled_text", "first_frame_latent"
GUIDANCE = 1.0
"""What networks with a guidance embedding are told in training: to predict without guidance."""
_KINDS = {
    FirstFrame.LATENT_CONCAT: InputKind.FRAME_CHANNELS,
    FirstFrame.TOKEN_REPLACE: InputKind.FRAMES,
}


def _codec(model: HunyuanVideoConfig) -> str:
    """Processor of the published weights, and its text encoder: with Llava for a first frame."""
    return "hunyuanvideo" if model.image_condition is FirstFrame.NONE else "hunyuanvideo_i2v"


def _inputs(model: HunyuanVideoConfig) -> tuple[SampleInput, ...]:
    of_text: Any = {"encoder": _codec(model)}
    width, pooled = model.crossattn_emb_size, model.pooled_size
    inputs = (
        SampleInput(name="text", kind=InputKind.TEXT, width=width, **of_text),
        SampleInput(name=POOLED, kind=InputKind.VECTOR, width=pooled, **of_text),
    )
    kind = _KINDS.get(model.image_condition)
    if kind is None:
        return inputs
    first: Any = {"width": model.in_channels, "required": False, "pictures": 1}
    return (*inputs, SampleInput(name=FIRST_FRAME, kind=kind, **first))


def hunyuan_video_cost(model: HunyuanVideoConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `HunyuanVideoTransformer3DModel`."""
    width, text = model.hidden_size, model.crossattn_emb_size
    before = replicated(model.input_features, width, bias=True)
    before += refiner_cost(width, text=text, layers=model.num_refiner_layers)
    before += condition_cost(width, pooled=model.pooled_size, guidance=model.guidance_embed)
    return NetworkCost(
        before=before, stacks=double_then_single(model), after=joint_head_cost(model)
    )


FAMILY = Family(
    name="hunyuan_video",
    config=HunyuanVideoConfig,
    network=imported("dit.models.hunyuan_video.model:HunyuanVideoNetwork"),
    cost=hunyuan_video_cost,
    parts={**JOINT_PARTS, "refiner": "text", "single_blocks": "single"},
    diffusers=imported("dit.models.hunyuan_video.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # indices of frames, whatever their rate
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        # Diffusers' pipelines hand their scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        of_size={
            "hunyuanvideo": {"guidance": GUIDANCE, "flow_shift": 7.0},
            "hunyuanvideo_i2v": {"guidance": GUIDANCE, "flow_shift": 7.0},
            "hunyuanvideo_i2v_33ch": {"guidance": None, "flow_shift": 7.0},
        },
    ),
    guidance=lambda model: GUIDANCE if model.guidance_embed else None,
    vae=_codec,
    tiny=TINY,
)
