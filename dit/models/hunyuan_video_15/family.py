"""What the family `hunyuan_video_15` says of itself; `dit.models.family` asks here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dit.models.cost import NetworkCost
from dit.models.family import (
    DiffusersForm,
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.hunyuan_video_15.config import TINY, HunyuanVideo15Config
from dit.models.layer_spec import (
    LEVEL_WAVES,
    Activation,
    AttentionSpec,
    Cost,
    DoubleLayerSpec,
    FeedForwardSpec,
    PerBlockModulation,
    RowKind,
    StackSpec,
    WeightShape,
    glyph_weights,
    refiner_cost,
    replicated,
)

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

TEXT, GLYPHS, IMAGE, FIRST_FRAME = "text", "text_2", "image_embed", "first_frame_latent"


def _network() -> Callable[..., Any]:
    from dit.models.hunyuan_video_15.model import HunyuanVideo15Network

    return HunyuanVideo15Network


def _diffusers() -> DiffusersForm:
    from dit.models.hunyuan_video_15.diffusers import FORM

    return FORM


def _positions(_: HunyuanVideo15Config) -> PositionRule:
    from dit.models.positions import GridPositions

    return GridPositions()  # indices of frames, whatever their rate


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
    width = model.hidden_size
    layer = DoubleLayerSpec(
        attention=AttentionSpec(width=width, heads=model.num_attention_heads, bias=True),
        feed_forward=FeedForwardSpec(
            width=width,
            hidden=model.ffn_hidden_size,
            activation=Activation.GELU_TANH,
            bias=True,
        ),
        text_is_read=False,
    )
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def hunyuan_video_15_cost(model: HunyuanVideo15Config) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `HunyuanVideo15Transformer3DModel`.

    Rows of words in quotation marks and of pictures count as those of a caption: what the refiner
    costs is counted too high by their part, and their own embeddings, which are less, not at all.
    """
    width = model.hidden_size
    return NetworkCost(
        before=_before(model),
        stacks=(hunyuan_video_15_stack(model),),
        after=PerBlockModulation().cost(width, 2)
        + replicated(width, model.output_features, bias=True),
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
    network=_network,
    cost=hunyuan_video_15_cost,
    parts={
        "modulate_out": "head",
        "proj_out": "head",
        "modulation": "modulation",
        "text": "text",
        "attention": "attention",
        "mlp": "mlp",
    },
    diffusers=_diffusers,
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(
        # Each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2), and the output
        # of the network as 0.
        zero=("*modulation.linear.weight", "*modulate_out.linear.weight", "*proj_out.weight"),
        no_decay=("text.kind",),
    ),
    objective=ObjectiveConventions(
        # Diffusers' pipelines hand their scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        clean_level=None,
    ),
    tells_step_end=lambda model: model.use_meanflow,
    vae=lambda _: "hunyuan",
    tiny=TINY,
)
