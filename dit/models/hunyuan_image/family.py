"""What the family `hunyuan_image` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import Any

from dit.models.family import Family, InputKind, ObjectiveConventions, SampleInput, WeightRules
from dit.models.hunyuan_image.config import TINY, HunyuanImageConfig
from dit.models.joint.layers import (
    ADALN_ZERO,
    JOINT_PARTS,
    double_then_single,
    grid_positions,
    joint_head_cost,
)
from dit.models.layer_spec import (
    Cost,
    NetworkCost,
    condition_cost,
    glyph_weights,
    refiner_cost,
    replicated,
)
from dit.models.registry import imported

TEXT, GLYPHS = "text", "text_2"
GUIDANCE = 3.25
"""What the published distilled network is told, `distilled_guidance_scale` of its pipeline."""


def _inputs(model: HunyuanImageConfig) -> tuple[SampleInput, ...]:
    rows: dict[str, Any] = {"kind": InputKind.TEXT, "encoder": "hunyuanimage"}
    quoted: dict[str, Any] = {"required": False, "may_be_empty": True}
    return (
        SampleInput(name=TEXT, width=model.crossattn_emb_size, **rows),
        SampleInput(name=GLYPHS, width=model.glyph_embed_size, **quoted, **rows),
    )


def hunyuan_image_cost(model: HunyuanImageConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `HunyuanImageTransformer2DModel`.

    Rows of words in quotation marks count as those of a caption: what the refiner costs is counted
    too high by their part, and their own embedding, which is less, not at all.
    """
    width, glyphs = model.hidden_size, model.glyph_embed_size
    before = replicated(model.patch_features, width, bias=True)
    before += condition_cost(width, guidance=model.guidance_embed, step_end=model.use_meanflow)
    before += refiner_cost(width, text=model.crossattn_emb_size, layers=model.num_refiner_layers)
    before += Cost(weights=(glyph_weights(width, inputs=glyphs, inside=model.glyph_hidden_size),))
    return NetworkCost(
        before=before, stacks=double_then_single(model), after=joint_head_cost(model)
    )


FAMILY = Family(
    name="hunyuan_image",
    config=HunyuanImageConfig,
    network=imported("dit.models.hunyuan_image.model:HunyuanImageNetwork"),
    cost=hunyuan_image_cost,
    parts={**JOINT_PARTS, "refiner": "text", "glyphs": "text", "single_blocks": "single"},
    diffusers=imported("dit.models.hunyuan_image.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # frame 0, which nothing turns with
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        # Diffusers' pipeline hands its scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        of_size={
            # The shift is sd-scripts' default.
            "hunyuanimage_21": {"guidance": None, "flow_shift": 5.0},
            "hunyuanimage_21_distilled": {"guidance": GUIDANCE, "flow_shift": 5.0},
        },
        clean_level=None,
    ),
    guidance=lambda model: GUIDANCE if model.guidance_embed else None,
    tells_step_end=lambda model: model.use_meanflow,
    vae=lambda _: "hunyuanimage",
    tiny=TINY,
)
