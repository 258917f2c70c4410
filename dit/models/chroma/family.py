"""What the family `chroma` says of itself; `dit.models.registry` asks here."""

from __future__ import annotations

from typing import Any

from dit.models.chroma.config import TINY, ChromaConfig
from dit.models.family import Family, InputKind, ObjectiveConventions, SampleInput, WeightRules
from dit.models.joint.layers import double_then_single, embedder_cost, grid_positions
from dit.models.layer_spec import (
    Cost,
    GivenModulation,
    NetworkCost,
    RowKind,
    StackSpec,
    WeightShape,
    replicated,
)
from dit.models.registry import imported


def _inputs(model: ChromaConfig) -> tuple[SampleInput, ...]:
    return (
        SampleInput(
            name="text",
            kind=InputKind.TEXT,
            width=model.crossattn_emb_size,
            may_be_empty=True,
            encoder="chroma",
        ),
    )


def chroma_stacks(model: ChromaConfig) -> tuple[StackSpec, ...]:
    """The layers; rows of modulations are those of single-stream layers, of latents, of text."""
    latents = 3 * model.num_single_layers
    return double_then_single(
        model,
        double=GivenModulation(latents, first_of_text=latents + 6 * model.num_layers),
        single=GivenModulation(0),
    )


def chroma_cost(model: ChromaConfig) -> NetworkCost:
    """The network; its arithmetic is that of Diffusers' `ChromaTransformer2DModel`."""
    return NetworkCost(
        before=embedder_cost(model) + _approximator_cost(model),
        stacks=chroma_stacks(model),
        after=replicated(model.hidden_size, model.output_features, bias=True),
    )


def _approximator_cost(model: ChromaConfig) -> Cost:
    """Of each sample it makes all rows of modulations."""
    width, layers = model.approximator_hidden_size, model.approximator_layers
    rows: Any = {"rows": RowKind.SAMPLES, "times": model.modulation_rows, "bias": True}
    total = replicated(model.approximator_channels, width, **rows)
    for _ in range(2 * layers):
        total += replicated(width, width, **rows)
    total += Cost(weights=(WeightShape(numbers=width),) * layers)  # norms
    return total + replicated(width, model.hidden_size, **rows)


FAMILY = Family(
    name="chroma",
    config=ChromaConfig,
    network=imported("dit.models.chroma.model:ChromaNetwork"),
    cost=chroma_cost,
    parts={
        "proj_out": "head",
        "told": "modulation",
        "attention": "attention",
        "mlp": "mlp",
        "single_blocks": "single",
    },
    diffusers=imported("dit.models.chroma.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,
    weights=WeightRules(
        # Each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2), and the output
        # of the network as 0.
        zero=("told.linear_out.weight", "proj_out.weight"),
    ),
    objective=ObjectiveConventions(
        # The pipeline hands its scheduler even steps from 1 to 1 / number of steps.
        settings={"name": "flow", "sampling_levels": "even"},
        of_size={"chroma": {"time_shift_type": "exponential"}},
        clean_level=None,
    ),
    vae=lambda _: "chroma",
    tiny=TINY,
)
