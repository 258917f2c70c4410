"""What the family `qwen_image` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dit.models.family import Family, InputKind, ObjectiveConventions, SampleInput, WeightRules
from dit.models.joint.layers import JOINT_PARTS, joint_head_cost, joint_layer_parts
from dit.models.layer_spec import (
    Cost,
    DoubleLayerSpec,
    NetworkCost,
    RowKind,
    StackSpec,
    WeightShape,
    replicated,
)
from dit.models.qwen_image.config import MODEL_SIZES, TINY, QwenImageConfig
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

REFERENCE = "reference_latent"
"""How the names of the latents of pictures to edit begin."""
LEVEL_WAVES = 256
"""Cosines and sines of the noise level that its embedding is made of; fixed in Diffusers."""
SCALE = 1000
"""Of the level that the network is told, over t, as in all schedulers of Diffusers."""


def _positions(_: QwenImageConfig) -> PositionRule:
    from dit.models.qwen_image.positions import CentredPositions

    return CentredPositions()


def _codec(model: QwenImageConfig) -> str:
    """Name of the VAE and of the text encoder, which sees the pictures that are edited."""
    if not model.reference_latents:
        return "qwen_image"
    return "qwen_image_edit_2511" if model.clean_references else "qwen_image_edit"


def _inputs(model: QwenImageConfig) -> tuple[SampleInput, ...]:
    text = SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        may_be_empty=True,
        encoder=_codec(model),
    )
    references = [
        SampleInput(
            name=f"{REFERENCE}_{number}",
            kind=InputKind.REFERENCE,
            width=model.in_channels,
            required=False,
            clean=model.clean_references,
        )
        for number in range(model.reference_latents)
    ]
    null = SampleInput(
        name="null_text",
        kind=InputKind.NULL_TEXT,
        width=model.crossattn_emb_size,
        required=False,
        may_be_empty=True,
    )
    return (text, *references, *((null,) if references else ()))


def qwen_image_stack(model: QwenImageConfig) -> StackSpec:
    """The layers of Qwen-Image; nothing reads the text after the last of them."""
    layer = DoubleLayerSpec(**joint_layer_parts(model), text_is_read=False)
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def qwen_image_cost(model: QwenImageConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `QwenImageTransformer2DModel`."""
    width, text, level = model.hidden_size, model.crossattn_emb_size, RowKind.SAMPLES
    before = replicated(model.patch_features, width, bias=True)
    before += replicated(LEVEL_WAVES, width, rows=level, bias=True)
    before += replicated(width, width, rows=level, bias=True)
    before += replicated(text, width, rows=RowKind.TEXT, bias=True)
    before += Cost(weights=(WeightShape(numbers=text),))
    return NetworkCost(
        before=before,
        stacks=(qwen_image_stack(model),),
        after=joint_head_cost(model),
    )


# scheduler_config.json of the published weights: mu is linear in the tokens of the latent.
_PUBLISHED = {
    "time_shift_type": "exponential",
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}

FAMILY = Family(
    name="qwen_image",
    config=QwenImageConfig,
    network=imported("dit.models.qwen_image.model:QwenImageNetwork"),
    cost=qwen_image_cost,
    parts={
        "text_attention": "text",
        "text_mlp": "text",
        "text_modulation": "modulation",
        "text_in": "text",
        **JOINT_PARTS,
    },
    diffusers=imported("dit.models.qwen_image.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    # Gates and the last layer start closed, as is usual of adaLN-Zero (arXiv:2212.09748).
    weights=WeightRules(zero=("*modulation.linear.weight", "*proj_out.weight")),
    objective=ObjectiveConventions(
        # Diffusers' pipelines hand their scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        of_size=dict.fromkeys(MODEL_SIZES, _PUBLISHED),
        keeps_norm=True,
    ),
    vae=_codec,
    tiny=TINY,
)
