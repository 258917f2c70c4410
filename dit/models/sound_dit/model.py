"""The network of `sound_dit`: streams of latents and of sound, which attend to each other."""
# T tokens of a stream, S keys of the other stream, N samples, M timesteps of both streams
# C patch features or channels of sound, D model width, X any width, H heads, K head width
# L text tokens, E text width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import LATENTS, SOUND, TEXT, NoisyTokens, PackedBatch, TokenStream
from dit.models.attention.spans import Spans
from dit.models.layer_spec import SOUND_TOKENS, TOKENS, PerBlockModulation
from dit.models.layers.across_attention import Crossing
from dit.models.layers.joint_order import TokenRow, row_exchange
from dit.models.layers.modulation import ConditionEmbedding, PerBlockAdaLN, TimestepConditioning
from dit.models.layers.packed_attention import (
    AttendedRows,
    RowConditions,
)
from dit.models.layers.parallel_linear import (
    BuildContext,
    Replicated,
    transformer_config,
)
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.sound_dit.family import (
    BASE_FPS,
    TEXT_OF_SOUND,
    SoundDitConfig,
    sound_dit_stack,
)
from dit.models.stacks.cross_transformer import axis_widths
from dit.models.stacks.parts import LayerConditions
from dit.models.stacks.stacked_transformer import Blocks, Shapes, StackedTransformer
from dit.pack_wire import to_device

Layout = dict[str, PerSample]
"""Maps the name of a stream of tokens to the timesteps of its tokens."""


class SoundDit(StackedTransformer):
    """Denoiser for videos with sound: maps noisy latents and noisy sound of a pack to outputs.

    In the attention between latents and sound, rotary positions are times, so that a frame and the
    sound at the same time have equal positions.
    """

    shares_samples = True

    def __init__(
        self, model: SoundDitConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, [sound_dit_stack(model)])
        sound, of_sound = model.sound_hidden_size, SOUND_TOKENS
        head = sound // model.sound_attention_heads
        self.rotary = RotaryTable(axis_widths(width // model.num_attention_heads), (1e4,) * 3)
        self.time_rotary = RotaryTable((head,), (1e4,))
        if self.pre_process:
            self.patches = Replicated(model.patch_features, width, config=config, token_row=TOKENS)
            self.sound_in = Replicated(
                model.sound_channels, sound, config=config, token_row=of_sound
            )
            self.level = ConditionEmbedding(config)
        self.build_stacks()
        if self.post_process:
            context = BuildContext(model=model, config=config, groups=groups)
            kind, once = PerBlockModulation(inputs=width), {"parts": 1, "gated": False}
            self.modulate_out = PerBlockAdaLN(context, width, kind, **once)
            self.proj_out = Replicated(
                width, model.output_features, config=config, token_row=TOKENS
            )
            self.sound_modulate_out = PerBlockAdaLN(context, sound, kind, **once)
            self.sound_proj_out = Replicated(
                sound, model.sound_channels, config=config, token_row=of_sound
            )

    def hidden_rows(self, batch: PackedBatch) -> Mapping[str, int]:
        sound = batch.others[SOUND]
        return {
            TOKENS: len(batch.segment_T) // self.token_parts,
            SOUND_TOKENS: len(sound.segment_T) // self.token_parts,
        }

    def hidden_width(self, name: str) -> int:
        return self.model.sound_hidden_size if name == SOUND_TOKENS else self.config.hidden_size

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        levels = batch.num_levels + batch.others[SOUND].num_levels
        return {"t_emb": (levels, self.config.hidden_size)}

    def token_places(self, batch: PackedBatch, layout: Any) -> Mapping[str, Tensor]:
        places, sound = super().token_places(batch, layout), batch.others[SOUND]
        place_T = to_device(sound.rows(sound.share), sound.segment_T.device) + batch.starts[-1]
        filling = (0, len(sound.segment_T) - len(place_T))
        return {**places, SOUND_TOKENS: nn.functional.pad(place_T, filling)}

    def layout(self, batch: PackedBatch) -> Layout:
        # The timesteps of sound come after those of latents in `t_emb`.
        sound_T = batch.others[SOUND].level_row_T + batch.num_levels
        return {
            TOKENS: self.per_sample(self.my_tokens(batch.level_row_T)),
            SOUND_TOKENS: self.per_sample(self.my_tokens(sound_T)),
        }

    def embed(self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: Layout) -> Blocks:  # noqa: ARG002
        fed, dtype = batch.others[SOUND].method(NoisyTokens), self.config.params_dtype
        assert fed is not None, "the sound stream has no `NoisyTokens`"
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            SOUND_TOKENS: self.sound_in(self.my_tokens(fed.input_TC.to(dtype))),
            "t_emb": self.level(torch.cat((level_M, fed.level_M))),
        }

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: Layout) -> LayerConditions:
        sound, context = batch.others[SOUND], self.context
        streams: Mapping[str, TokenStream] = {TOKENS: batch, SOUND_TOKENS: sound}
        times = {
            TOKENS: self.time_rotary(batch.position_TA[:, :1]),
            SOUND_TOKENS: self.time_rotary(sound.position_TA * (BASE_FPS / self.model.sound_rate)),
        }
        angles = {TOKENS: self.rotary(batch.position_TA), SOUND_TOKENS: times[SOUND_TOKENS]}
        text_LE = batch.text_LE.to(self.config.params_dtype)
        rows = {
            name: TokenRow.of_stream(stream, attended=stream.num_tokens)
            for name, stream in streams.items()
        }
        device = batch.segment_T.device

        def crossing(asking: str, answering: str) -> Crossing:
            return Crossing(
                exchange=row_exchange(
                    rows[asking], rows[answering], context=context, device=device
                ),
                angles_TK=times[asking],
                key_angles_SK=times[answering],
            )

        return LayerConditions(
            timestep=TimestepConditioning(t_emb_ND=blocks["t_emb"]),
            rows={
                name: RowConditions(per_sample=layout[name], angles_TK=angles[name])
                for name in streams
            },
            meetings={
                (name,): context.exchange(stream, rows=len(stream.segment_T))
                for name, stream in streams.items()
            },
            keys={
                TEXT: AttendedRows(rows_LE=text_LE, spans=text_spans(batch, batch.text_starts)),
                TEXT_OF_SOUND: AttendedRows(
                    rows_LE=text_LE, spans=text_spans(sound, batch.text_starts)
                ),
            },
            crossings={
                TOKENS: crossing(TOKENS, SOUND_TOKENS),
                SOUND_TOKENS: crossing(SOUND_TOKENS, TOKENS),
            }
            if self.model.streams_meet
            else {},
        )

    def head(self, blocks: Blocks, batch: PackedBatch, layout: Layout) -> Any:  # noqa: ARG002
        """The outputs [T, C] of both streams, by the names of the streams in a pack."""
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"])
        (video,), (sound,) = self.modulate_out(timestep), self.sound_modulate_out(timestep)
        video_TD = video.modulate(blocks[TOKENS], layout[TOKENS])
        sound_TD = sound.modulate(blocks[SOUND_TOKENS], layout[SOUND_TOKENS])
        return {
            LATENTS: self.all_tokens(self.proj_out(video_TD)),
            SOUND: self.all_tokens(self.sound_proj_out(sound_TD)),
        }


def text_spans(stream: TokenStream, starts: Sequence[int]) -> Spans:
    """Spans for attention of this rank's tokens of `stream` to the captions of their samples.

    `starts` are the N + 1 offsets of the samples' text tokens.
    """
    captions = [(first, stop - first) for first, stop in pairwise(starts)]
    tokens, device = len(stream.segment_T), stream.segment_T.device
    return Spans.of(stream.shared_spans, captions, total=tokens, device=device)
