"""The family `chroma`, Chroma1: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config.checks import Rule, bounded
from dit.models.family import (
    Family,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    text_input,
)
from dit.models.joint.family import (
    EVEN_STEPS,
    TINY_DOUBLE_SINGLE,
    DoubleSingleConfig,
    double_then_single,
)
from dit.models.layer_spec import NetworkSpec, SharedModulation, StackSpec
from dit.models.registry import imported

MOST_APPROXIMATOR_LAYERS = 64

MODEL_SIZES: dict[str, dict[str, Any]] = {"chroma": {}}
"""Fields of `model` by size name; Chroma1 HD, Base and Flash have the same size."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "chroma": {
        **TINY_DOUBLE_SINGLE,
        "hidden_size": 48,
        "crossattn_emb_size": 16,
        "rope_axes": (4, 4, 4),
        "approximator_channels": 8,
        "approximator_hidden_size": 20,
        "approximator_layers": 2,
    }
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class ChromaConfig(DoubleSingleConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "chroma"
    """A named size (chroma) or `custom`."""
    family: str = "chroma"
    approximator_channels: int = bounded(64, most=2**20, least=None)
    """Number of cosines and sines that the approximator (the network of all modulations) gets: a
    quarter is of the timestep, a quarter of the guidance, half of the modulation vector's index."""
    approximator_hidden_size: int = bounded(5120, most=2**20)
    """Hidden size of the approximator, the network that computes all modulations."""
    approximator_layers: int = bounded(5, most=MOST_APPROXIMATOR_LAYERS)
    """Number of layers of the approximator, the network that computes all modulations."""

    def own_sizes(self) -> list[Rule]:
        channels = self.approximator_channels
        return [
            *super().own_sizes(),
            (
                channels >= 4 and channels % 4 == 0,
                f"approximator_channels={channels} must be a positive multiple of 4, because a"
                " quarter of the channels is for the timestep, a quarter for the guidance, and"
                " half for the vector's index",
            ),
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to} must be null: Chroma attends to one token of"
                " padding, which `data_prep --processor chroma` stores with each caption",
            ),
        ]

    @property
    def modulation_rows(self) -> int:
        """Number of modulation vectors of all layers and the head: scales, shifts and gates."""
        return 3 * self.num_single_layers + 12 * self.num_layers + 2


def _inputs(model: ChromaConfig) -> tuple[SampleInput, ...]:
    return (text_input(model, encoder="chroma", may_be_empty=True),)


def chroma_stacks(model: ChromaConfig) -> tuple[StackSpec, ...]:
    """The specifications of the double-stream and single-stream layers.

    The order of modulation vectors is: single-stream layers, latents of double-stream layers, text
    of double-stream layers.
    """
    latents = 3 * model.num_single_layers
    return double_then_single(
        model,
        latents=SharedModulation(latents, each=6),
        text=SharedModulation(latents + 6 * model.num_layers, each=6),
        single=SharedModulation(0, each=3),
    )


FAMILY = Family(
    name="chroma",
    config=ChromaConfig,
    network=imported("dit.models.chroma.model:ChromaNetwork"),
    spec=lambda model: NetworkSpec(stacks=chroma_stacks(model)),
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
        settings=EVEN_STEPS,
        of_size={"chroma": {"time_shift_type": "exponential"}},
        clean_level=None,
    ),
    vae=lambda _: "chroma",
    tiny=TINY,
)
