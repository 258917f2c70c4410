"""The family `ideogram4`, Ideogram 4: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, bounded
from dit.models.family import (
    TINY_NETWORK,
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    far_picture_positions,
)
from dit.models.joint.family import (
    ADALN_ZERO,
    JOINT_PARTS,
    attends_to_no_padding,
    learns_pictures,
    sequential_layer,
)
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    Modulation,
    NetworkSpec,
    PerBlockModulation,
    RowNorm,
    StackSpec,
)
from dit.models.registry import imported

EPS = 1e-5
THETA = 5e6
"""Base of the rotary frequencies."""
TITLE = "Ideogram 4"
LEVELS: Mapping[str, Any] = {
    "logit_std": 1.5,
    "shift_base_tokens": 1024,  # 512 x 512 pixels: logits of their noise levels have mean 0
    "text_dropout": 0.0,  # guidance uses a second network instead of dropped captions
}
"""Keys of `objective` that determine the noise levels in training and in the pipeline's sampler."""

MODEL_SIZES: dict[str, dict[str, Any]] = {"ideogram4": {}}
"""Fields of `model` by size name, from config.json of ideogram-ai/ideogram-4-fp8."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "ideogram4": {
        **TINY_NETWORK,
        "hidden_size": 64,
        "mlp_ratio": 1.25,
        "patch_spatial": 2,
        "crossattn_emb_size": 20,
        "adaln_width": 12,
        "mrope_section": (4, 2, 2),
    }
}
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class Ideogram4Config(ModelConfig):
    """Keys of `model`: sizes, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES

    name: str = "ideogram4"
    """A named size (ideogram4) or `custom`."""
    family: str = "ideogram4"
    num_layers: int = 34
    """Number of layers; each computes latents and text jointly."""
    hidden_size: int = 4608
    num_attention_heads: int = 18
    """Number of attention heads."""
    mlp_ratio: float = 12288 / 4608
    in_channels: int = 128
    patch_spatial: int = 1
    crossattn_emb_size: int = 53248
    """Width of the text in the shards: 13 interleaved hidden states of each token, which take 106
    KB."""
    adaln_width: int = bounded(512, most=2**17)
    """Width of the timestep embedding from which all modulations are computed."""
    mrope_section: tuple[int, int, int] = bounded((24, 20, 20), most=2**17, least=None)
    """Numbers of a head's frequencies for index, row and column (MRoPE), as in config.json. With
    (i, r, c), the first r of the frequencies 1, 4, 7, ... are for the row, the first c of 2, 5, 8,
    ... for the column, and all others for the index."""

    def own_sizes(self) -> list[Rule]:
        return [learns_pictures(self, TITLE), attends_to_no_padding(self, TITLE)]

    def own_shapes(self) -> list[Rule]:
        heads, width = self.num_attention_heads, self.hidden_size
        pairs, sections = width // heads // 2, list(self.mrope_section)
        last = max(axis + 3 * (count - 1) for axis, count in enumerate(sections) if axis)
        return [
            (
                width % (2 * heads) == 0,
                f"hidden_size={width} must be a multiple of 2 * num_attention_heads ="
                f" {2 * heads}: rotary positions need heads of an even width",
            ),
            (
                min(sections) > 0 and last < pairs,
                f"mrope_section={sections} must have numbers of at least 1, and needs {last + 1}"
                f" frequencies; heads of width {width // heads} have {pairs}",
            ),
        ]

    @property
    def cost_sizes(self) -> list[int]:
        return [*super().cost_sizes, self.crossattn_emb_size, self.adaln_width]


def ideogram4_stack(model: Ideogram4Config) -> StackSpec:
    """The specification of the layers; modulations are linears of a timestep embedding."""
    width, heads = model.hidden_size, model.num_attention_heads
    attention = AttentionSpec(width=width, heads=heads, eps=EPS)
    mlp = FeedForwardSpec(width=width, hidden=model.ffn_hidden_size, activation=Activation.SWIGLU)
    level = PerBlockModulation(inputs=model.adaln_width, activated=False)
    modulation = Modulation("modulation", level, shifted=False, tanh=True)
    layer = sequential_layer(attention, mlp, modulation, norm=RowNorm("norm", eps=EPS), after=True)
    return StackSpec(name="blocks", count=model.num_layers, layer=layer)


def _inputs(model: Ideogram4Config) -> tuple[SampleInput, ...]:
    """The input `text`; a dropped caption has no rows.

    The published pipeline drops no captions: its guidance uses a second network.
    """
    text = SampleInput(
        name="text",
        kind=InputKind.TEXT,
        width=model.crossattn_emb_size,
        may_be_empty=True,
        null=NullInput.EMPTY,
        encoder="ideogram4",
    )
    return (text,)


FAMILY = Family(
    name="ideogram4",
    config=Ideogram4Config,
    network=imported("dit.models.ideogram4.model:Ideogram4Network"),
    spec=lambda model: NetworkSpec(stacks=(ideogram4_stack(model),)),
    parts={**JOINT_PARTS, "text_embedder": "text"},
    diffusers=imported("dit.models.ideogram4.diffusers:FORM"),
    inputs=_inputs,
    positions=far_picture_positions,
    weights=WeightRules(zero=ADALN_ZERO, no_decay=("row_kind.weight",)),
    objective=ObjectiveConventions(
        settings={"name": "flow", "sampling_levels": "quantiles", **LEVELS},
        sign=-1,
        tells_data_part=True,
        clean_level=None,
    ),
    vae=lambda _: "ideogram4",
    tiny=TINY,
)
