"""A family that a test defines: three rows of tokens, of which each layer changes all.

Latents and text attend jointly, as in FLUX; sound attends to itself; latents and sound attend to
each other. Sound has a width and noise levels of its own, and a sample may lack it.
`$DIT_FAMILIES=toy_sound=tests.toy_sound_family:FAMILY` registers it, in spawned processes too.
"""

# T latents, A sound tokens, L text tokens, N samples, M noise levels of latents, then of sound
# C patch features or channels of sound

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import LATENTS, SOUND, TEXT, NoisyTokens, PackedBatch
from dit.config import ModelConfig, Precision
from dit.models.diffusers.arrangements import ByOwnHead
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.family import Family, InputKind, ObjectiveConventions, SampleInput, WeightRules
from dit.models.joint.family import double_layer
from dit.models.joint.tensor_names import HEAD_ROWS, double_stream_rows, stream_sizes
from dit.models.layer_spec import (
    SOUND_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Attend,
    AttendAcross,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    LayerSpec,
    Modulation,
    NetworkSpec,
    NormKind,
    PerBlockModulation,
    Port,
    RowNorm,
    StackSpec,
)
from dit.models.layers.across_attention import Crossing
from dit.models.layers.joint_order import TokenRow, row_exchange
from dit.models.layers.modulation import sinusoid
from dit.models.layers.packed_attention import RowConditions
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.positions import GridPositions
from dit.models.stacks.joint_transformer import T_EMB, JointTransformer
from dit.models.stacks.stack import LayerStack
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.pack_wire import to_device

FRAME_RATE, SOUND_RATE = 24.0, 40.0
"""Frames of latents and of sound per second."""
PLACE = "toy_sound=tests.toy_sound_family:FAMILY"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySoundConfig(ModelConfig):
    """Sizes of the rows."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {"toy_sound": {}}
    name: str = "toy_sound"
    family: str = "toy_sound"
    num_layers: int = 4
    hidden_size: int = 48
    num_attention_heads: int = 4
    in_channels: int = 4
    crossattn_emb_size: int = 8
    sound_channels: int = 6
    sound_hidden_size: int = 32
    sound_attention_heads: int = 4
    streams_meet: bool = True
    """Whether latents and sound attend to each other."""

    @property
    def stack(self) -> StackSpec:
        width, sound = self.hidden_size, self.sound_hidden_size
        wide = AttentionSpec(width=width, heads=self.num_attention_heads, bias=True)
        narrow = AttentionSpec(width=sound, heads=self.sound_attention_heads, bias=True)
        feed = FeedForwardSpec(width=width, hidden=self.ffn_hidden_size, bias=True)
        feed_sound = FeedForwardSpec(width=sound, hidden=2 * sound, bias=True)
        attend, *feeds = double_layer(wide, feed).groups
        s = Modulation("sound_modulation", PerBlockModulation(inputs=width))
        norm, norm_sound = (RowNorm(f"{row}norm_across", NormKind.BARE) for row in ("", "sound_"))
        hears = Port(TOKENS, "from_sound_attention", norm=norm)
        sees = Port(SOUND_TOKENS, "from_video_attention", norm=norm_sound)
        heard, seen = (replace(port, module="", writes=False) for port in (sees, hears))
        across = (
            AttendAcross(hears, heard, narrow, (width, sound)),
            AttendAcross(sees, seen, narrow, (sound, width)),
        )
        steps = (
            (*attend, Attend(Port(SOUND_TOKENS, "sound_attention", s[0]), narrow)),
            *((across,) if self.streams_meet else ()),
            (*chain(*feeds), Feed(Port(SOUND_TOKENS, "sound_mlp", s[1]), feed_sound)),
        )
        return StackSpec(name="blocks", count=self.num_layers, layer=LayerSpec(steps))


class ToySoundNetwork(JointTransformer):
    def __init__(
        self, model: ToySoundConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width, sound = transformer_config(model), model.hidden_size, model.sound_hidden_size
        super().__init__(config, model, groups, vp_stage, [model.stack])
        self.rotary = RotaryTable((width // model.num_attention_heads // 3,) * 3, (1e4,) * 3)
        self.time_rotary = RotaryTable((sound // model.sound_attention_heads,), (1e4,))
        biased: Any = {"config": config, "bias": True}
        if self.pre_process:
            self.patches = Replicated(model.patch_features, width, **biased)
            self.text_in = Replicated(model.crossattn_emb_size, width, **biased)
            self.sound_in = Replicated(model.sound_channels, sound, **biased)
            self.level = Replicated(width, width, **biased)
        self.build_stacks()
        self.build_head(TOKENS)
        if self.post_process:
            self.sound_proj_out = Replicated(sound, model.sound_channels, **biased)

    def rows_beside(self, stack: LayerStack) -> tuple[str, ...]:
        return stack.hidden

    def hidden_rows(self, batch: PackedBatch) -> Mapping[str, int]:
        sound = len(batch.others[SOUND].segment_T) // self.token_parts
        return {**super().hidden_rows(batch), SOUND_TOKENS: sound}

    def hidden_width(self, name: str) -> int:
        return self.model.sound_hidden_size if name == SOUND_TOKENS else self.config.hidden_size

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        levels = batch.num_levels + batch.others[SOUND].num_levels
        return {T_EMB: (levels, self.config.hidden_size)}

    def token_places(self, batch: PackedBatch, layout: Any) -> Mapping[str, Tensor]:
        places, sound = super().token_places(batch, layout), batch.others[SOUND]
        # Text is numbered after all latents, sound after both.
        place_A = sound.rows(sound.share) + batch.starts[-1] + sum(self.text_lengths(batch))
        rows, device = len(sound.segment_T), sound.segment_T.device
        return {**places, SOUND_TOKENS: pad(to_device(place_A, device), (0, rows - len(place_A)))}

    def embed(self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: Any) -> Blocks:
        dtype, fed = self.config.params_dtype, batch.others[SOUND].method(NoisyTokens)
        text_LE = layout.text.of(batch.text_LE.to(dtype))
        wave_MD = sinusoid(torch.cat((level_M, fed.level_M)), self.config.hidden_size)
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.text_in(self.my_tokens(text_LE)),
            SOUND_TOKENS: self.sound_in(self.my_tokens(fed.input_TC.to(dtype))),
            T_EMB: self.level(wave_MD.to(dtype)),
        }

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: Any) -> Any:
        joint, sound = super().conditions(blocks, batch, layout), batch.others[SOUND]
        hears_N = torch.tensor([float(number > 0) for number in sound.num_tokens])
        hears_T = to_device(hears_N, batch.segment_T.device)[batch.segment_T]
        # Level rows of sound follow those of latents.
        levels = self.per_sample(self.my_tokens(sound.level_row_T + batch.num_levels))
        meet: Any = {"context": self.context, "device": batch.segment_T.device}
        video, heard = self.latents_row(batch), TokenRow.of_stream(sound, attended=sound.num_tokens)
        of_video = self.time_rotary(batch.position_TA[:, :1])
        of_sound = self.time_rotary(sound.position_TA * (FRAME_RATE / SOUND_RATE))
        to_sound, to_video = row_exchange(video, heard, **meet), row_exchange(heard, video, **meet)
        hears = Crossing(exchange=to_sound, angles_TK=of_video, key_angles_SK=of_sound)
        hears = replace(hears, has_keys_T1=self.my_tokens(hears_T)[:, None])
        sees = Crossing(exchange=to_video, angles_TK=of_sound, key_angles_SK=of_video)
        row = RowConditions(per_sample=levels, angles_TK=of_sound)
        alone = self.context.exchange(sound, rows=len(sound.segment_T))
        return replace(
            joint,
            rows={**joint.rows, SOUND_TOKENS: row},
            meetings={**joint.meetings, (SOUND_TOKENS,): alone},
            crossings={TOKENS: hears, SOUND_TOKENS: sees},
        )

    def head(self, blocks: Blocks, batch: PackedBatch, layout: Any) -> Mapping[str, Tensor]:
        sound_AC = self.all_tokens(self.sound_proj_out(blocks[SOUND_TOKENS]))
        return {LATENTS: super().head(blocks, batch, layout), SOUND: sound_AC}


_OUTSIDE = "patches D C, text_in D E, sound_in A B, level D D, sound_proj_out B A"
"""Names of linears, each with the letters of its numbers of outputs and inputs."""
_IN_LAYERS = """
sound_attention.linear_proj A A, sound_mlp.linear_fc1 2A A, sound_mlp.linear_fc2 A 2A,
from_sound_attention.linear_q A D, from_sound_attention.linear_proj D A,
from_video_attention.linear_q A A, from_video_attention.linear_proj A A,
sound_modulation.linear 6A D
"""
_FUSED = "sound_attention qkv 3A A, from_sound_attention kv 2A A, from_video_attention kv 2A D"


def _rows() -> Iterator[Row]:
    """Rows of the name table, but those of double-stream layers and of the head of latents."""
    for name, *sizes in map(str.split, _OUTSIDE.split(",")):
        yield from linear_rows(name, name, *sizes)
    for name, *sizes in map(str.split, _IN_LAYERS.split(",")):
        yield from linear_rows(f"blocks.layers.*.{name}", f"blocks.*.{name}", *sizes)
    for name, letters, *sizes in map(str.split, _FUSED.split(",")):
        ours, theirs = f"blocks.layers.*.{name}", f"blocks.*.{name}"
        each, by_head = [f"{theirs}.{x}" for x in letters], ByOwnHead(heads="sound_attention_heads")
        yield from linear_rows(f"{ours}.linear_{letters}", (*each,), *sizes, arrangement=by_head)
        for norm in ("q_layernorm.weight", "k_layernorm.weight"):
            yield Row(f"{ours}.{norm}", (f"{theirs}.{norm}",), TensorSplit.REPLICATED, ("J",))


def _sizes(model: ToySoundConfig) -> dict[str, int]:
    sound = model.sound_hidden_size
    sizes = {f"{n}A": n * sound for n in (2, 3, 6)} | {"A": sound, "B": model.sound_channels}
    return stream_sizes(model) | sizes | {"J": sound // model.sound_attention_heads}


NAMES = NameTable(
    rows=(*_rows(), *HEAD_ROWS, *double_stream_rows("blocks.layers.*", "blocks.*")),
    sizes=_sizes,
    layers=lambda model: {"blocks": model.num_layers},
)
"""What adapters and Muon need: queries, keys and values apart."""
FAMILY = Family(
    name="toy_sound",
    config=ToySoundConfig,
    network=lambda: ToySoundNetwork,
    names=lambda: NAMES,
    spec=lambda model: NetworkSpec(stacks=(model.stack,)),
    parts={"text": "text", "sound": "sound", "video": "sound", "attention": "attention"},
    inputs=lambda model: (
        SampleInput(name=TEXT, kind=InputKind.TEXT, width=model.crossattn_emb_size),
        SampleInput(
            name=SOUND,
            kind=InputKind.SOUND,
            width=model.sound_channels,
            rate=SOUND_RATE,
            required=False,
        ),
    ),
    positions=lambda _: GridPositions(FRAME_RATE),
    weights=WeightRules(zero=("*proj_out.weight",)),
    objective=ObjectiveConventions(settings={"name": "flow"}),
    vae=lambda _: "pixel",
    tiny={"toy_sound": {"precision": Precision.FP32}},
)
