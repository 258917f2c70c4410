"""The family `ltx`, LTX-Video 0.9: its fields, sizes, rules, inputs and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule
from dit.config.resume import OfInputs
from dit.models.family import (
    TINY_NETWORK,
    ConditionRules,
    Family,
    HasReferences,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    reference_inputs,
    text_input,
)
from dit.models.layer_spec import (
    TOKENS,
    Activation,
    Attend,
    AttendTo,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    KeyRows,
    LayerSpec,
    Modulation,
    NetworkSpec,
    Port,
    QkNorm,
    StackSpec,
    TableModulation,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PixelPositions

FIRST_FRAME = "first_frame_latent"


TRAINED_SHIFT: Mapping[str, Any] = {
    "time_shift_type": "exponential",
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
}
"""Keys of `objective`: a shift by the number of target tokens, for logit-normal noise levels, as in
Lightricks' trainer and in the scheduler of 0.9.0."""


class FramePositions(StrEnum):
    """Position of latent frame f on the time axis, in seconds, which config.json does not tell."""

    EVEN = "even"  # 8 f / fps (0.9.0 and 0.9.1)
    CAUSAL = "causal"  # max(8 f - 7, 0) / fps: frame 0 is a single video frame (0.9.5 and later)


MODEL_SIZES: dict[str, dict[str, Any]] = {
    "ltxv_2b_0.9": {"frame_positions": FramePositions.EVEN},
    "ltxv_2b": {},
    "ltxv_13b": {"num_layers": 48, "hidden_size": 4096},
}
"""Fields of `model` by size name, from config.json of 0.9.0 and Lightricks' files for 0.9.5 to
0.9.8."""
_TINY = {**TINY_NETWORK, "hidden_size": 40, "patch_spatial": 2, "crossattn_emb_size": 16}
TINY: Mapping[str, Mapping[str, Any]] = {
    "ltxv_2b_0.9": _TINY,
    "ltxv_2b": {**_TINY, "hidden_size": 32, "reference_latents": 1},
}
"""Keys of `model` for tiny networks (`Family.tiny`); in one of them two pairs of numbers are left
over and not rotated, in the other one pair."""


@dataclass(frozen=True, kw_only=True)
class LtxConfig(HasReferences, ModelConfig):
    """Keys of `model`: sizes, positions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    shown_before: ClassVar[Mapping[str, str]] = {"frame_positions": "reference_latents"}

    name: str = "ltxv_2b"
    """A named size (ltxv_2b_0.9, ltxv_2b, ltxv_13b) or `custom`."""
    family: str = "ltx"
    num_layers: int = 28
    hidden_size: int = 2048
    num_attention_heads: int = 32
    in_channels: int = 128
    patch_spatial: int = 1
    crossattn_emb_size: int = 4096
    frame_positions: FramePositions = FramePositions.CAUSAL
    """Positions of latent frames on the time axis: even, 8 f / fps seconds (0.9.0, 0.9.1), or
    causal, max(8 f - 7, 0) / fps seconds (0.9.5 and later)."""
    reference_latents: OfInputs[int] = 0
    """Largest number of reference videos of a sample, which become additional clean tokens with
    the positions of the target's tokens."""

    def own_sizes(self) -> list[Rule]:
        return [
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to} must be null: LTX-Video does not attend to padding"
                " of captions",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        heads, width = self.num_attention_heads, self.hidden_size // self.num_attention_heads
        return [
            (
                self.hidden_size % heads > 0 or (width % 2 == 0 and self.hidden_size >= 6),
                f"hidden_size={self.hidden_size} / num_attention_heads={heads} gives heads of"
                f" width {width}; rotary positions need heads of an even width, and a hidden_size"
                " of at least 6",
            ),
        ]

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.crossattn_emb_size, self.patch_features]


def _inputs(model: LtxConfig) -> tuple[SampleInput, ...]:
    given: Any = {"width": model.in_channels, "required": False, "pictures": 1}
    return (
        text_input(model, encoder="ltx"),
        SampleInput(name=FIRST_FRAME, kind=InputKind.FRAMES, **given),
        *reference_inputs(model, clean=True),
    )


def ltx_positions(model: LtxConfig) -> PixelPositions:
    """The rule that gives the tokens of `model` their positions, in seconds and pixels."""
    from dit.models.positions import PixelPositions

    causal = model.frame_positions is FramePositions.CAUSAL
    return PixelPositions(causal=causal, patch=(model.patch_temporal, model.patch_spatial))


def ltx_conditions(model: LtxConfig) -> ConditionRules | None:
    """The rules for conditioning pictures and clips that begin at any frame, for `model`.

    Returns None if its frame positions are not causal, or if a patch has several latent frames.
    """
    from dit.models.positions import CELL

    if model.frame_positions is not FramePositions.CAUSAL or model.patch_temporal > 1:
        return None
    # `num_prefix_latent_frames` in the pipeline's `prepare_latents`.
    where = ltx_positions(model).of_condition
    return ConditionRules(positions=where, temporal_stride=CELL[0], prefix_frames=2)


def ltx_stack(model: LtxConfig) -> StackSpec:
    """The specification of LTX-Video's layers."""
    width = model.hidden_size
    attention = AttentionSpec(
        width=width,
        heads=model.num_attention_heads,
        bias=True,
        norm=QkNorm.ACROSS_HEADS,
        eps=1e-5,
    )
    feed_forward = FeedForwardSpec(
        width=width, hidden=model.ffn_hidden_size, activation=Activation.GELU_TANH, bias=True
    )
    modulation = Modulation("modulation", TableModulation())
    steps = (
        Attend(Port(TOKENS, "self_attention", modulation[0]), attention),
        AttendTo(Port(TOKENS, "cross_attention"), attention, (KeyRows(width),)),
        Feed(Port(TOKENS, "mlp", modulation[1]), feed_forward),
    )
    return StackSpec(name="blocks", count=model.num_layers, layer=LayerSpec(steps))


FAMILY = Family(
    name="ltx",
    config=LtxConfig,
    network=imported("dit.models.ltx.model:LtxNetwork"),
    spec=lambda model: NetworkSpec(stacks=(ltx_stack(model),)),
    parts={
        "self_attention": "attention",
        "cross_attention": "cross_attention",
        "mlp": "mlp",
        "modulation": "modulation",
        "modulate_out": "head",
        "proj_out": "head",
    },
    diffusers=imported("dit.models.ltx.diffusers:FORM"),
    inputs=_inputs,
    positions=ltx_positions,
    conditions=ltx_conditions,
    weights=WeightRules(zero=("*proj_out.weight",), no_decay=("*.table",)),
    objective=ObjectiveConventions(
        settings={"name": "flow", "sampling_levels": "even", **TRAINED_SHIFT},
        of_size={
            "ltxv_2b_0.9": {"shift_terminal": 0.1},
            "ltxv_2b": {"sampling_levels": "linear_quadratic"},
            "ltxv_13b": {"sampling_levels": "linear_quadratic"},
        },
    ),
    vae=lambda _: "ltx",
    tiny=TINY,
)
