"""The layers of the DiT, as a description that parameters, operations and memory follow from."""

from __future__ import annotations

from dit.models.cost import Cost, NetworkCost, RowKind, StackCost, WeightShape
from dit.models.dit.config import DitConfig
from dit.models.layer_costs import (
    cross_attention,
    cross_layer,
    feed_forward,
    low_rank_modulation,
    replicated,
    self_attention,
)


def dit_cost(model: DitConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `CosmosTransformer3DModel`."""
    return NetworkCost(
        before=_before(model),
        stacks=(StackCost(count=model.num_layers, layer=_layer(model)),),
        after=_after(model),
        text_tokens=model.text_pad_to,
    )


def _layer(model: DitConfig) -> Cost:
    width, heads, hidden = model.hidden_size, model.num_attention_heads, model.ffn_hidden_size
    modulation = low_rank_modulation(width=width, rank=model.adaln_lora_dim, vectors=3)
    return cross_layer(
        width=width,
        hidden=hidden,
        attention=self_attention(width=width, heads=heads),
        text_attention=cross_attention(width=width, heads=heads, text_width=model.text_width),
        mlp=feed_forward(width=width, hidden=hidden),
        modulation=modulation + modulation + modulation,
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
    last = low_rank_modulation(width=width, rank=model.adaln_lora_dim, vectors=2)
    return last + replicated(width, model.output_features)
