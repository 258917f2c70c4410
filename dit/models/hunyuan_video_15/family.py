"""What the family `hunyuan_video_15` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from dit.models.family import (
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.hunyuan_video_15.config import TINY, HunyuanVideo15Config
from dit.models.joint.layers import (
    ADALN_ZERO,
    JOINT_PARTS,
    grid_positions,
    joint_head_cost,
    joint_layer_parts,
)
from dit.models.layer_spec import (
    LEVEL_WAVES,
    Cost,
    DoubleLayerSpec,
    NetworkCost,
    RowKind,
    StackSpec,
    WeightShape,
    glyph_weights,
    refiner_cost,
    replicated,
)
from dit.models.registry import imported

TEXT, GLYPHS, IMAGE, FIRST_FRAME = "text", "text_2", "image_embed", "first_frame_latent"


def _inputs(model: HunyuanVideo15Config) -> tuple[SampleInput, ...]:
    return (
        SampleInput(
            name=TEXT, kind=InputKind.TEXT, width=model.crossattn_emb_size, encoder="hunyuan"
        ),
        SampleInput(
            name=GLYPHS,
            kind=InputKind.TEXT,
            width=model.glyph_embed_size,
            required=False,
            may_be_empty=True,
            encoder="hunyuan",
        ),
        SampleInput(
            name=IMAGE,
            kind=InputKind.TEXT,
            width=model.image_embed_size,
            required=False,
            may_be_empty=True,
            null=NullInput.KEPT,
            pictures=1,
        ),
        SampleInput(
            name=FIRST_FRAME,
            kind=InputKind.FRAME_CHANNELS,
            width=model.in_channels,
            required=False,
            pictures=1,
        ),
    )


def hunyuan_video_15_stack(model: HunyuanVideo15Config) -> StackSpec:
    """The layers after the refiner's; nothing reads the text after the last of them."""
    layer = DoubleLayerSpec(**joint_layer_parts(model), text_is_read=False)
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def hunyuan_video_15_cost(model: HunyuanVideo15Config) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `HunyuanVideo15Transformer3DModel`.

    Rows of words in quotation marks and of pictures count as those of a caption: what the refiner
    costs is counted too high by their part, and their own embeddings, which are less, not at all.
    """
    return NetworkCost(
        before=_before(model),
        stacks=(hunyuan_video_15_stack(model),),
        after=joint_head_cost(model),
    )


def _before(model: HunyuanVideo15Config) -> Cost:
    """Patches, levels, and the row of text."""
    width, one_row = model.hidden_size, {"rows": RowKind.SAMPLES, "bias": True}
    total = replicated(model.input_features, width, bias=True)
    for _ in range(1 + model.use_meanflow):  # of the noise level, of where a step ends
        total += replicated(LEVEL_WAVES, width, **one_row) + replicated(width, width, **one_row)
    text, image = model.crossattn_emb_size, model.image_embed_size
    total += refiner_cost(width, text=text, layers=model.num_refiner_layers)
    inputs, inside = model.glyph_embed_size, model.glyph_hidden_size
    glyphs = glyph_weights(width, inputs=inputs, inside=inside)
    of_image = 2 * image + (image + 1) * image + (image + 1) * width + 2 * width
    return total + Cost(weights=(glyphs, WeightShape(numbers=of_image + 3 * width)))


FAMILY = Family(
    name="hunyuan_video_15",
    config=HunyuanVideo15Config,
    network=imported("dit.models.hunyuan_video_15.model:HunyuanVideo15Network"),
    cost=hunyuan_video_15_cost,
    parts={**JOINT_PARTS, "text": "text"},
    diffusers=imported("dit.models.hunyuan_video_15.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # indices of frames, whatever their rate
    weights=WeightRules(zero=ADALN_ZERO, no_decay=("text.kind",)),
    objective=ObjectiveConventions(
        # Diffusers' pipelines hand their scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        of_size={"hunyuanvideo_15": {"flow_shift": 5.0}},  # of the published scheduler at 480p
        clean_level=None,
    ),
    tells_step_end=lambda model: model.use_meanflow,
    vae=lambda _: "hunyuan",
    tiny=TINY,
)
