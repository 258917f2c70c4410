"""What the family `flux` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from dit.models.family import (
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.flux.config import TINY, FluxConfig
from dit.models.joint.layers import (
    ADALN_ZERO,
    JOINT_PARTS,
    double_then_single,
    embedder_cost,
    grid_positions,
    joint_head_cost,
)
from dit.models.layer_spec import NetworkCost, condition_cost
from dit.models.registry import imported

POOLED = "pooled_text"
GUIDANCE = 1.0
"""What networks with a guidance embedding are told in training: to predict without guidance."""


def _inputs(model: FluxConfig) -> tuple[SampleInput, ...]:
    text = SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        may_be_empty=True,
        encoder="flux",
    )
    pooled = SampleInput(
        name=POOLED, kind=InputKind.VECTOR, width=model.pooled_size, encoder="flux"
    )
    references = (
        SampleInput(
            name=f"reference_latent_{number}",
            kind=InputKind.REFERENCE,
            width=model.in_channels,
            required=False,
            clean=False,
        )
        for number in range(model.reference_latents)
    )
    return (text, pooled, *references)


def flux_cost(model: FluxConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `FluxTransformer2DModel`."""
    told = condition_cost(
        model.hidden_size, pooled=model.pooled_size, guidance=model.guidance_embed
    )
    return NetworkCost(
        before=embedder_cost(model) + told,
        stacks=double_then_single(model),
        after=joint_head_cost(model),
    )


# In the published pipelines of dev and Kontext the shift follows from the tokens.
_DISTILLED = {"guidance": GUIDANCE, "time_shift_type": "exponential"}

FAMILY = Family(
    name="flux",
    config=FluxConfig,
    network=imported("dit.models.flux.model:FluxNetwork"),
    cost=flux_cost,
    parts={**JOINT_PARTS, "single_blocks": "single"},
    diffusers=imported("dit.models.flux.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # a picture has frame 0, its references 1, 2, ...
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        # Diffusers' pipelines hand their scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        of_size={
            "flux1_dev": _DISTILLED,
            "flux1_schnell": {"guidance": None, "time_shift_type": None},
            "flux1_kontext": _DISTILLED,
        },
        clean_level=None,
    ),
    guidance=lambda model: GUIDANCE if model.guidance_embed else None,
    vae=lambda _: "flux",
    tiny=TINY,
)
