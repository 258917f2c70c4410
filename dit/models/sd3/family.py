"""What the family `sd3` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dit.models.family import (
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.joint.layers import ADALN_ZERO, JOINT_PARTS, joint_head_cost
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    DoubleLayerSpec,
    FeedForwardSpec,
    NetworkCost,
    QkNorm,
    RowKind,
    StackSpec,
    condition_cost,
    replicated,
)
from dit.models.registry import imported
from dit.models.sd3.config import MODEL_SIZES, TINY, Sd3Config

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

POOLED, TABLE = "pooled_text", "positions.table"


def _positions(model: Sd3Config) -> PositionRule:
    from dit.models.positions import CroppedPositions

    return CroppedPositions(model.table_side)


def _inputs(model: Sd3Config) -> tuple[SampleInput, ...]:
    text = SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        may_be_empty=True,
        encoder="sd3",
    )
    pooled = SampleInput(name=POOLED, kind=InputKind.VECTOR, width=model.pooled_size, encoder="sd3")
    return (text, pooled)


def sd3_stacks(model: Sd3Config) -> tuple[StackSpec, ...]:
    """The layers: those with a second attention, the others, and the last, where the text ends."""
    width, norm = model.hidden_size, QkNorm.PER_HEAD if model.qk_norm else QkNorm.NONE
    parts: Any = {
        "attention": AttentionSpec(
            width=width, heads=model.num_attention_heads, bias=True, norm=norm
        ),
        "feed_forward": FeedForwardSpec(
            width=width,
            hidden=model.ffn_hidden_size,
            activation=Activation.GELU_TANH,
            bias=True,
        ),
    }
    layers = {
        "dual_blocks": DoubleLayerSpec(**parts, second_attention=True),
        "blocks": DoubleLayerSpec(**parts),
        "last_block": DoubleLayerSpec(
            **parts, updates_text=False, second_attention=ends_dual(model)
        ),
    }
    counts = model.stack_layers.items()
    return tuple(StackSpec(name=name, count=n, layer=layers[name]) for name, n in counts)


def ends_dual(model: Sd3Config) -> bool:
    """Whether the last layer has a second attention, too."""
    return model.dual_attention_layers == model.num_layers


def sd3_cost(model: Sd3Config) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `SD3Transformer2DModel`."""
    width = model.hidden_size
    return NetworkCost(
        before=replicated(model.patch_features, width, bias=True)
        + replicated(model.crossattn_emb_size, width, rows=RowKind.TEXT, bias=True)
        + condition_cost(width, pooled=model.pooled_size),
        stacks=sd3_stacks(model),
        after=joint_head_cost(model),
    )


FAMILY = Family(
    name="sd3",
    config=Sd3Config,
    network=imported("dit.models.sd3.model:Sd3Network"),
    cost=sd3_cost,
    parts=JOINT_PARTS,
    diffusers=imported("dit.models.sd3.diffusers:FORM"),
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(zero=ADALN_ZERO, fixed=(TABLE,)),
    objective=ObjectiveConventions(
        settings={"name": "flow"},
        of_size={size: {"flow_shift": 3.0} for size in MODEL_SIZES},  # of the published schedulers
        clean_level=None,
    ),
    vae=lambda _: "sd3",
    tiny=TINY,
)
