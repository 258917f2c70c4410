"""The family `sound_dit`, a DiT with latents and sound: its fields, sizes, rules and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from dit.config import ContextComm, ModelConfig
from dit.config.checks import Rule, bounded
from dit.config.resume import Refused
from dit.models.family import (
    TINY_NETWORK,
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    text_input,
)
from dit.models.layer_spec import (
    SOUND_TOKENS,
    TOKENS,
    Attend,
    AttendAcross,
    AttendTo,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    KeyRows,
    LayerSpec,
    Modulation,
    NetworkSpec,
    PerBlockModulation,
    Port,
    StackSpec,
    Step,
)
from dit.models.registry import imported

if TYPE_CHECKING:
    from dit.models.positions import PositionRule

TEXT_OF_SOUND = "text_of_sound"
"""Name in `LayerConditions.keys` of the caption states to which sound attends."""
BASE_FPS = 24.0
"""Positions on the time axis per second, for latents and for sound."""


@dataclass(frozen=True, kw_only=True)
class SoundDitConfig(ModelConfig):
    """Keys of `model`: sizes of both streams, and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sound_dit_s": {},
        "sound_dit_b": {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "sound_hidden_size": 384,
            "sound_attention_heads": 12,
        },
    }

    name: str = "sound_dit_s"
    family: str = "sound_dit"
    num_layers: int = 12
    hidden_size: int = 384
    num_attention_heads: int = 6
    sound_channels: Refused[int] = bounded(160, most=2**16)
    """Number of channels of a sound's latent: `sound_latent.channels` of the dataset card."""
    sound_rate: Refused[float] = bounded(100.0, most=1e6, least=None)
    """Latent frames of sound per second: `data_prep`'s wave_rate / wave_frame."""
    sound_hidden_size: Refused[int] = bounded(192, most=2**17)
    """Width of sound tokens in the layers; a multiple of sound_attention_heads."""
    sound_attention_heads: Refused[int] = bounded(6, most=2**10)
    """Number of heads of self-attention of sound, and of attention between sound and frames."""
    streams_meet: Refused[bool] = True
    """Whether frames and sound attend to each other; false: each attends only to itself."""

    def own_sizes(self) -> list[Rule]:
        return [(self.sound_rate > 0, f"sound_rate={self.sound_rate} must be positive")]

    def own_shapes(self) -> list[Rule]:
        heads, tp = self.sound_attention_heads, self.tensor_model_parallel_size
        by_heads = self.cp_comm_type is ContextComm.A2A
        ranks = tp * (self.context_parallel_size if by_heads else 1)
        width, sound = self.hidden_size // self.num_attention_heads, self.sound_hidden_size
        return [
            (
                self.hidden_size % self.num_attention_heads > 0
                or (width % 2 == 0 and width // 6 >= 2),
                f"hidden_size={self.hidden_size} / num_attention_heads={self.num_attention_heads}"
                f" gives heads of width {width}; 3-D rotary positions need an even width of at"
                " least 12",
            ),
            (
                sound % (2 * heads) == 0,
                f"sound_hidden_size={sound} / sound_attention_heads={heads} gives heads of width"
                f" {sound / heads:g}, which must be even",
            ),
            (
                heads % ranks == 0,
                f"sound_attention_heads={heads} must be a multiple of {ranks}, the number of ranks"
                " that divide heads (tensor_model_parallel_size, times context_parallel_size if"
                " cp_comm_type=a2a)",
            ),
            (
                int(sound * self.mlp_ratio) % tp == 0,
                f"tensor_model_parallel_size={tp} must divide {int(sound * self.mlp_ratio)}, the"
                " MLP width of sound (sound_hidden_size * mlp_ratio)",
            ),
            (
                self.context_parallel_size == 1 or self.cp_comm_type is not ContextComm.P2P,
                "cp_comm_type=p2p works for a single sequence of tokens, but this network has two;"
                " set cp_comm_type=a2a or all_gather",
            ),
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to} must be null: padded captions are only for"
                " published weights of other families",
            ),
        ]

    @property
    def cost_sizes(self) -> list[int]:
        return [*super().cost_sizes, self.sound_hidden_size, self.sound_channels]


def sound_dit_stack(model: SoundDitConfig) -> StackSpec:
    """The specification of the layers.

    Frames and sound attend to themselves, to text and, with `streams_meet`, to each other.
    """
    modulation = PerBlockModulation(inputs=model.hidden_size)
    v, s = Modulation("modulation", modulation), Modulation("sound_modulation", modulation)
    width, sound = model.hidden_size, model.sound_hidden_size
    attention = AttentionSpec(width=width, heads=model.num_attention_heads)
    of_sound = AttentionSpec(width=sound, heads=model.sound_attention_heads)
    text = model.crossattn_emb_size
    wide = FeedForwardSpec(width=width, hidden=model.ffn_hidden_size)
    narrow = FeedForwardSpec(width=sound, hidden=int(sound * model.mlp_ratio))

    def read(row: str, port: Port) -> Port:
        return Port(row, slot=port.slot, writes=False)

    from_sound, from_video = (
        Port(TOKENS, "from_sound", v[3]),
        Port(SOUND_TOKENS, "from_video", s[3]),
    )
    across: tuple[Step, ...] = (
        (
            AttendAcross(from_sound, read(SOUND_TOKENS, from_video), of_sound, (width, sound)),
            AttendAcross(from_video, read(TOKENS, from_sound), of_sound, (sound, width)),
        ),
    )
    steps: tuple[Step, ...] = (
        (
            Attend(Port(TOKENS, "self_attention", v[0]), attention),
            Attend(Port(SOUND_TOKENS, "sound_self_attention", s[0]), of_sound),
        ),
        (
            AttendTo(Port(TOKENS, "cross_attention", v[1]), attention, (KeyRows(text),)),
            AttendTo(
                Port(SOUND_TOKENS, "sound_cross_attention", s[1]),
                of_sound,
                (KeyRows(text, name=TEXT_OF_SOUND),),
            ),
        ),
        *(across if model.streams_meet else ()),
        (
            Feed(Port(TOKENS, "mlp", v[2]), wide),
            Feed(Port(SOUND_TOKENS, "sound_mlp", s[2]), narrow),
        ),
    )
    return StackSpec(name="decoder", count=model.num_layers, layer=LayerSpec(steps))


def _inputs(model: SoundDitConfig) -> tuple[SampleInput, ...]:
    sound = SampleInput(
        name="sound",
        kind=InputKind.SOUND,
        width=model.sound_channels,
        required=False,
        rate=model.sound_rate,
    )
    return text_input(model, encoder="cosmos"), sound


def _positions(_: SoundDitConfig) -> PositionRule:
    return resolve_name("dit.models.positions:GridPositions")(BASE_FPS)


FAMILY = Family(
    name="sound_dit",
    config=SoundDitConfig,
    network=imported("dit.models.sound_dit.model:SoundDit"),
    names=imported("dit.models.sound_dit.names:TABLE"),
    spec=lambda model: NetworkSpec(stacks=(sound_dit_stack(model),)),
    parts={
        "self_attention": "attention",
        "sound_self_attention": "sound",
        "cross_attention": "cross_attention",
        "sound_cross_attention": "sound",
        "from_sound": "streams",
        "from_video": "streams",
        "mlp": "mlp",
        "sound_mlp": "sound",
        "modulation": "modulation",
        "sound_modulation": "modulation",
        "modulate_out": "head",
        "sound_modulate_out": "head",
        "proj_out": "head",
        "sound_proj_out": "head",
    },
    inputs=_inputs,
    positions=_positions,
    weights=WeightRules(
        # Each layer starts as the identity (adaLN-Zero, arXiv:2212.09748, Sec. 3.2), and the output
        # of the network as 0.
        zero=("*proj_out.weight", "*modulat*.linear.weight"),
        sound=("sound_*", "decoder.layers.sound_*", "decoder.layers.from_video.*"),
        hears=("decoder.layers.from_sound.*",),
    ),
    objective=ObjectiveConventions(settings={"name": "flow"}),
    vae=lambda _: "cosmos",
    tiny={
        "sound_dit_s": {
            **TINY_NETWORK,
            "hidden_size": 48,
            "mlp_ratio": 2.0,
            "crossattn_emb_size": 16,
            "sound_channels": 6,
            "sound_hidden_size": 32,
            "sound_attention_heads": 4,
        }
    },
)
