"""What the family `wan` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dit.models.family import (
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    Cost,
    CrossLayerSpec,
    FeedForwardSpec,
    NetworkCost,
    QkNorm,
    RowKind,
    StackSpec,
    TableModulation,
    WeightShape,
    replicated,
)
from dit.models.registry import imported
from dit.models.wan.config import MODEL_SIZES, TINY, ImageCondition, WanConfig

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

CONDITION, IMAGE, FIRST_FRAME = "condition_latent", "image_embed", "first_frame_latent"


def _positions(_: WanConfig) -> PositionRule:
    from dit.models.positions import GridPositions

    return GridPositions()  # indices of frames, whatever their rate


def _inputs(model: WanConfig) -> tuple[SampleInput, ...]:
    found = [
        SampleInput(
            name="text",
            kind=InputKind.TEXT,
            width=model.crossattn_emb_size,
            encoder="wan",
        )
    ]
    pictures = 2 if model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME else 1
    if model.condition_channels:
        found.append(
            SampleInput(
                name=CONDITION,
                kind=InputKind.CHANNELS,
                width=model.in_channels,
                pictures=pictures,
            )
        )
    if model.image_embed_size is not None:
        found.append(
            SampleInput(
                name=IMAGE,
                kind=InputKind.TEXT,
                width=model.image_embed_size,
                rows=model.image_embed_length,
                null=NullInput.KEPT,
                pictures=pictures,
            )
        )
    if model.image_condition is ImageCondition.CLEAN_FIRST_FRAME:
        given = {"width": model.in_channels, "required": False}
        given |= {"pictures": pictures}
        found.append(SampleInput(name=FIRST_FRAME, kind=InputKind.FRAMES, **given))
    return tuple(found)


def wan_stack(model: WanConfig) -> StackSpec:
    """The layers of Wan."""
    width = model.hidden_size
    attention = AttentionSpec(
        width=width, heads=model.num_attention_heads, bias=True, norm=QkNorm.ACROSS_HEADS
    )
    layer = CrossLayerSpec(
        attention=attention,
        cross_attention=attention,
        text_width=width,
        feed_forward=FeedForwardSpec(
            width=width,
            hidden=model.ffn_hidden_size,
            activation=Activation.GELU_TANH,
            bias=True,
        ),
        modulation=TableModulation(),
        gated_cross=False,
        image_rows=model.image_rows,
    )
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def wan_cost(model: WanConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `WanTransformer3DModel`."""
    width = model.hidden_size
    return NetworkCost(
        before=_before(model),
        stacks=(wan_stack(model),),
        after=TableModulation().cost(width, 2)
        + replicated(width, model.output_features, bias=True),
        text_tokens=model.text_pad_to,
        image_rows=model.image_rows or 0,
    )


def _before(model: WanConfig) -> Cost:
    """Patches; the embeddings of level, text and image."""
    width, level = model.hidden_size, {"rows": RowKind.SAMPLES, "bias": True}
    total = replicated(model.input_features, width, bias=True)
    total += replicated(model.freq_dim, width, **level)
    total += replicated(width, width, **level) + replicated(width, 6 * width, **level)
    total += replicated(model.crossattn_emb_size, width, rows=RowKind.TEXT, bias=True)
    total += replicated(width, width, rows=RowKind.TEXT, bias=True)
    if model.image_embed_size is None:
        return total
    image, rows = model.image_embed_size, model.image_embed_length
    total += replicated(image, image, **level, times=rows)
    total += replicated(image, width, **level, times=rows)
    positions = rows * image if model.image_embed_positions else 0
    # Both norms have weights and biases.
    return total + Cost(weights=(WeightShape(numbers=2 * (image + width) + positions),))


FAMILY = Family(
    name="wan",
    config=WanConfig,
    network=imported("dit.models.wan.model:WanNetwork"),
    cost=wan_cost,
    parts={
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "norm_cross": "cross_attention",
        "mlp": "mlp",
        "modulation": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=imported("dit.models.wan.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(
        # As in Wan's published code, where tables are normal with 1 / sqrt(width).
        zero=("*proj_out.weight", "*image_embedder.positions"),
        no_decay=("*.table", "*image_embedder.positions"),
    ),
    objective=ObjectiveConventions(
        settings={"name": "flow"},
        # Of the published schedulers.
        of_size={
            **{size: {"flow_shift": 3.0} for size in MODEL_SIZES},
            "wan2.1_flf2v_14b": {"flow_shift": 16.0},
            "wan2.2_ti2v_5b": {"flow_shift": 5.0},
        },
    ),
    vae=lambda _: "wan",
    tiny=TINY,
)
