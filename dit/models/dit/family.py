"""What the family `dit` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dit.models.dit.config import CLEAN_LEVEL, OBJECTIVES_OF_SIZES, TINY, DitConfig
from dit.models.family import (
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.layer_spec import (
    AttentionSpec,
    Cost,
    CrossLayerSpec,
    FeedForwardSpec,
    LowRankModulation,
    NetworkCost,
    RowKind,
    StackSpec,
    WeightShape,
    replicated,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PositionRule


def _positions(model: DitConfig) -> PositionRule:
    from dit.models.positions import GridPositions

    return GridPositions(model.base_fps)


def _vae(model: DitConfig) -> str:
    """Cosmos 1, which has learnable positions, and DiTs of our own: cosmos; else Wan's VAE."""
    if model.crossattn_proj_size is not None:
        return "cosmos_predict25"
    is_predict2 = model.concat_padding_mask and not model.learnable_positions
    return "cosmos_predict2" if is_predict2 else "cosmos"


def _inputs(model: DitConfig) -> tuple[SampleInput, ...]:
    projected = model.crossattn_proj_size is not None
    text = SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        encoder="cosmos_predict25" if projected else "cosmos",
    )
    if not model.condition_mask:
        return (text,)
    frames = SampleInput(
        name="first_frame_latent",
        kind=InputKind.FRAMES,
        width=model.in_channels,
        required=False,
        pictures=1,
    )
    return text, frames


def dit_stack(model: DitConfig) -> StackSpec:
    """The layers of the DiT."""
    width = model.hidden_size
    # eps as in Diffusers' attention, which differs from that of its other norms.
    attention = AttentionSpec(width=width, heads=model.num_attention_heads, eps=1e-5)
    layer = CrossLayerSpec(
        attention=attention,
        cross_attention=attention,
        text_width=model.text_width,
        feed_forward=FeedForwardSpec(width=width, hidden=model.ffn_hidden_size),
        modulation=LowRankModulation(model.adaln_lora_dim),
        learned_positions=model.learnable_positions,
    )
    return StackSpec(name="decoder", count=model.num_layers, layer=layer)


def dit_cost(model: DitConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `CosmosTransformer3DModel`."""
    return NetworkCost(
        before=_before(model),
        stacks=(dit_stack(model),),
        after=_after(model),
        text_tokens=model.text_pad_to,
    )


def _before(model: DitConfig) -> Cost:
    """Text projection, patches, timestep embedding with its norm, learnable positions."""
    width, per_sample = model.hidden_size, RowKind.SAMPLES
    total = replicated(model.patch_features + model.mask_features, width)
    total += replicated(width, width, rows=per_sample)
    total += replicated(width, 3 * width, rows=per_sample)
    total += Cost(weights=(WeightShape(numbers=width),))
    if model.crossattn_proj_size is not None:
        inputs, outputs = model.crossattn_emb_size, model.crossattn_proj_size
        total += replicated(inputs, outputs, rows=RowKind.TEXT, bias=True)
    return total + _learnable_positions(model)


def _learnable_positions(model: DitConfig) -> Cost:
    if not model.learnable_positions:
        return Cost()
    frames, rows, columns = model.max_size
    spatial = rows // model.patch_spatial + columns // model.patch_spatial
    table = (frames // model.patch_temporal + spatial) * model.hidden_size
    return Cost(weights=(WeightShape(numbers=table),))


def _after(model: DitConfig) -> Cost:
    """The last modulation, which has no gate, and the output."""
    width = model.hidden_size
    last = LowRankModulation(model.adaln_lora_dim).cost(width, 2)
    return last + replicated(width, model.output_features)


FAMILY = Family(
    name="dit",
    config=DitConfig,
    network=imported("dit.models.dit.model:DiT"),
    cost=dit_cost,
    parts={
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "mlp": "mlp",
        "modulate_self": "modulation",
        "modulate_cross": "modulation",
        "modulate_mlp": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=imported("dit.models.dit.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(
        # Each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2), and the output
        # of the network as 0.
        zero=("*proj_out.weight", "*modulate*linear_2*"),
        no_decay=("*pos_emb_*",),
    ),
    objective=ObjectiveConventions(clean_level=CLEAN_LEVEL, of_size=OBJECTIVES_OF_SIZES),
    vae=_vae,
    tiny=TINY,
)
