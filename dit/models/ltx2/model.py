"""LTX-2: streams of latents and of sound, which attend to their captions and to each other."""
# T packed tokens of a stream, C patch features, M timesteps, N samples, L text tokens
# D width of a stream, E width of a text, X any width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, silu

from dit.batch import LATENTS, TEXT, NoisyTokens, PackedBatch, TokenStream
from dit.models.attention.spans import Spans
from dit.models.layer_spec import LEVEL_WAVES, SOUND_TOKENS, TOKENS
from dit.models.layers.across_attention import Crossing
from dit.models.layers.joint_order import TokenRow, row_exchange
from dit.models.layers.modulation import TableAdaLN, TimestepConditioning, TwoLinears, sinusoid
from dit.models.layers.packed_attention import AttendedRows, RowConditions
from dit.models.layers.parallel_linear import (
    BuildContext,
    Replicated,
    WholeLinear,
    transformer_config,
)
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import WholeWidthRotary
from dit.models.ltx2.connectors import Connector
from dit.models.ltx2.family import (
    SOUND,
    SOUND_TEXT,
    CrossLevels,
    Ltx2Config,
    TextModulation,
    ltx2_stack,
    rows_between,
    rows_of_table,
    rows_of_text,
)
from dit.models.ltx2.layers import CAPTIONS
from dit.models.positions import CellMiddles
from dit.models.stacks.parts import LayerConditions
from dit.models.stacks.stacked_transformer import Blocks, Output, Shapes, StackedTransformer
from dit.pack_wire import to_device

ROWS = {TOKENS: (LATENTS, TEXT), SOUND_TOKENS: (SOUND, SOUND_TEXT)}
"""Maps the name of a stream in the layers to (its name in a pack, name of its text)."""
SCALES_BETWEEN, GATES = 4, 1
"""Numbers of shared vectors for the attention between the streams: 4 scales and shifts of its
inputs, and 1 gate of its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLayout:
    """The streams of a pack, and properties of their tokens that all layers share."""

    streams: Mapping[str, TokenStream]
    """The streams by name, `TOKENS` or `SOUND_TOKENS`."""
    per_sample: Mapping[str, PerSample]
    """The timesteps of the tokens, by the name of the stream."""
    hears_T1: Tensor | None
    """`Crossing.has_keys_T1` of latents, float32 [T, 1]: 1 for tokens of samples with sound, else
    0; None: all samples have sound."""


class LevelRows(nn.Module):
    """Maps timesteps [M] to (shared modulation vectors [M, rows * D], timestep embedding [M, D]).

    The arithmetic is that of Diffusers' `LTX2AdaLayerNormSingle`.
    """

    def __init__(self, width: int, rows: int, config: TransformerConfig):
        super().__init__()
        self.level = TwoLinears(LEVEL_WAVES, config, widths=(width, width))
        self.rows = Replicated(width, rows * width, config=config, bias=True)

    def forward(self, level_M: Tensor) -> tuple[Tensor, Tensor]:
        wave_MX = sinusoid(level_M, LEVEL_WAVES).to(self.rows.weight.dtype)
        t_emb_MD = self.level(wave_MX)
        return self.rows(silu(t_emb_MD)), t_emb_MD


class CaptionProjection(nn.Module):
    """Maps caption states [L, E] to the width of a stream, [L, D]; ranks compute all tokens."""

    def __init__(self, inputs: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.linear_1 = WholeLinear(inputs, width, dtype=dtype)
        self.linear_2 = WholeLinear(width, width, dtype=dtype)

    def forward(self, text_LE: Tensor) -> Tensor:
        return self.linear_2(gelu(self.linear_1(text_LE), approximate="tanh"))


class StreamEmbedding(MegatronModule):
    """Embeds the inputs of one stream: tokens, timesteps, and the captions to which it attends."""

    def __init__(self, model: Ltx2Config, context: BuildContext, row: str):
        config = context.config
        super().__init__(config=config)
        is_sound = row == SOUND_TOKENS
        width, features, text = (
            (model.sound_hidden_size, model.sound_channels, model.sound_text_size)
            if is_sound
            else (model.hidden_size, model.patch_features, model.crossattn_emb_size)
        )
        self.patches = Replicated(features, width, config=config, token_row=row, bias=True)
        self.levels = LevelRows(width, model.table_rows, config)
        self.between = LevelRows(width, SCALES_BETWEEN, config)
        self.gates = LevelRows(width, GATES, config)
        self.text_levels = self.text_embedder = self.connector = None
        if model.text_modulation is TextModulation.TOLD:
            # Every tensor rank has all caption tokens, and the whole gradient.
            whole = copy(config)
            whole.sequence_parallel = False
            self.text_levels = LevelRows(width, 2, whole)
        if model.text_projections:
            self.text_embedder = CaptionProjection(text, width, config.params_dtype)
        if model.has_connectors:
            self.connector = Connector(model, context, text)
            self.connector.requires_grad_(False)

    def caption(self, text_LE: Tensor, starts: Sequence[int], per_sample: PerSample) -> Tensor:
        """The caption states to which layers attend, from the states `text_LE` in the shards.

        They are [L, D], or with connectors [N * `connector_rows`, D]; without projections D is E.
        `starts` are the N + 1 offsets of the samples; `per_sample` says which kernels may be used.
        """
        if self.connector is not None:
            with torch.no_grad():
                text_LE = self.connector(text_LE, starts, per_sample)
        return text_LE if self.text_embedder is None else self.text_embedder(text_LE)


class Ltx2Network(StackedTransformer):
    """Denoiser of LTX-2: predicts the velocity of each noisy token of both streams of a pack.

    The arithmetic is that of Diffusers' `LTX2VideoTransformer3DModel`. The noisy sound is in
    `NoisyTokens` of the pack's stream `sound`. For a pack without this stream, the sound's layers
    process zeros, to which latents do not attend, and the output has only the latents.
    """

    shares_samples = True

    def __init__(
        self, model: Ltx2Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        super().__init__(config, model, groups, vp_stage, [ltx2_stack(model)])
        width, sound = model.hidden_size, model.sound_hidden_size
        of_heads: Any = {"heads": model.num_attention_heads, "group": groups.tp}
        of_heads["dtype"] = torch.float64
        self.rotary = WholeWidthRotary(width, **of_heads)
        self.time_rotary = WholeWidthRotary(sound, **of_heads, axes=1)
        self.keyframes = None
        if self.pre_process:
            context = BuildContext(model=model, config=config, groups=groups)
            self.video_in = StreamEmbedding(model, context, TOKENS)
            self.sound_in = StreamEmbedding(model, context, SOUND_TOKENS)
            if model.keyframe_embedding:
                rows = torch.zeros(1, width, dtype=config.params_dtype)
                self.keyframes = nn.Parameter(rows)
        self.build_stacks()
        if self.post_process:
            out: Any = {"config": config, "bias": True}
            self.modulate_out = TableAdaLN(config, width, parts=1, gated=False)
            self.proj_out = Replicated(width, model.output_features, **out, token_row=TOKENS)
            self.sound_modulate_out = TableAdaLN(config, sound, parts=1, gated=False)
            self.sound_proj_out = Replicated(
                sound, model.sound_channels, **out, token_row=SOUND_TOKENS
            )

    def parameters_without_gradient(self) -> list[str]:
        unused = [] if self.keyframes is None else ["keyframes"]
        return [*super().parameters_without_gradient(), *unused]

    def streams(self, batch: PackedBatch) -> dict[str, TokenStream]:
        """The streams of the pack by name; if it has no sound, that stream is `_idle`."""
        sound = batch.others.get(SOUND)
        return {TOKENS: batch, SOUND_TOKENS: self._idle(batch) if sound is None else sound}

    def _idle(self, batch: PackedBatch) -> TokenStream:
        """A stream of zeros for a pack without sound, so that each weight has a gradient."""
        rows, device = self.model.token_multiple, batch.segment_T.device
        last_T = torch.full((rows,), batch.num_samples - 1, device=device)
        nothing_T = torch.zeros(rows, dtype=torch.bool, device=device)
        return TokenStream(
            latent_TC=torch.zeros(rows, self.model.sound_channels, device=device),
            position_TA=torch.zeros(rows, 1, device=device),
            segment_T=last_T,
            is_real_T=nothing_T,
            is_target_T=nothing_T,
            level_row_T=last_T,
            grids=((0, 1, 1),) * batch.num_samples,
            starts=(0,) * (batch.num_samples + 1),
            share=batch.share,
            methods={},
        )

    def hidden_rows(self, batch: PackedBatch) -> Mapping[str, int]:
        parts = self.token_parts
        return {row: len(one.segment_T) // parts for row, one in self.streams(batch).items()}

    def hidden_width(self, name: str) -> int:
        return self.model.sound_hidden_size if name == SOUND_TOKENS else self.model.hidden_size

    def token_places(self, batch: PackedBatch, layout: StreamLayout) -> Mapping[str, Tensor]:
        places = dict(super().token_places(batch, layout))
        sound, whole = layout.streams[SOUND_TOKENS], batch.starts[-1]
        place_T = to_device(sound.rows(sound.share), sound.segment_T.device) + whole
        places[SOUND_TOKENS] = pad(place_T, (0, len(sound.segment_T) - len(place_T)))
        return places

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        shapes: dict[str, tuple[int, ...]] = {}
        for row, stream in self.streams(batch).items():
            width, levels = self.hidden_width(row), stream.num_levels
            text = self._text_starts(batch, row)[-1]
            shapes[_t_emb(row)] = (levels, width)
            shapes[rows_of_table(row)] = (levels, self.model.table_rows * width)
            shapes[rows_between(row)] = (levels, (SCALES_BETWEEN + GATES) * width)
            shapes[_text(row)] = (text, width)
            if self.model.text_modulation is TextModulation.TOLD:
                shapes[rows_of_text(row)] = (batch.num_samples, 2 * width)
        return shapes

    def _source(self, row: str) -> str:
        """Name, in the shards, of the text to which the stream `row` attends."""
        one_text = self.model.has_connectors and self.model.text_projections
        return TEXT if one_text else ROWS[row][1]

    def _text_starts(self, batch: PackedBatch, row: str) -> Sequence[int]:
        """The N + 1 offsets of the samples in the text to which the stream `row` attends."""
        if self.model.has_connectors:
            rows = self.model.connector_rows
            return range(0, rows * batch.num_samples + 1, rows)
        return batch.text_offsets[ROWS[row][1]]

    def layout(self, batch: PackedBatch) -> StreamLayout:
        streams = self.streams(batch)
        rows = {row: self.my_tokens(one.level_row_T) for row, one in streams.items()}
        of_rows = {row: self.per_sample(own_T) for row, own_T in rows.items()}
        heard = [number > 0 for number in streams[SOUND_TOKENS].num_tokens]
        hears_T1 = None
        if not all(heard):
            hears_N = to_device(torch.tensor(heard, dtype=torch.float32), batch.segment_T.device)
            hears_T1 = hears_N[self.my_tokens(batch.segment_T)][:, None]
        return StreamLayout(
            streams=streams,
            per_sample={row: replace(one, rms=True) for row, one in of_rows.items()},
            hears_T1=hears_T1,
        )

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: StreamLayout
    ) -> Blocks:
        dtype, blocks = self.config.params_dtype, Blocks()
        sound = layout.streams[SOUND_TOKENS]
        fed = sound.method(NoisyTokens)
        if fed is None:
            levels_N = level_M[: batch.num_samples]
            fed = NoisyTokens(input_TC=sound.latent_TC, level_M=levels_N)
        levels = {TOKENS: level_M, SOUND_TOKENS: fed.level_M}
        inputs = {TOKENS: x_TC, SOUND_TOKENS: fed.input_TC}
        embeddings = {TOKENS: self.video_in, SOUND_TOKENS: self.sound_in}
        others = {TOKENS: SOUND_TOKENS, SOUND_TOKENS: TOKENS}
        for row, made in embeddings.items():
            own_M, samples = levels[row], batch.num_samples
            across_M = own_M
            if self.model.cross_levels is CrossLevels.OTHER:
                # Repeated for noisy and for clean tokens.
                across_M = levels[others[row]][:samples].repeat(len(own_M) // samples)
            blocks[row] = made.patches(self.my_tokens(inputs[row].to(dtype)))
            rows_MX, blocks[_t_emb(row)] = made.levels(own_M)
            blocks[rows_of_table(row)] = rows_MX
            between = (made.between(across_M)[0], made.gates(across_M)[0])
            blocks[rows_between(row)] = torch.cat(between, dim=-1)
            source = self._source(row)
            text, starts = batch.texts[source].to(dtype), batch.text_offsets[source]
            blocks[_text(row)] = made.caption(text, starts, layout.per_sample[row])
            if made.text_levels is not None:
                blocks[rows_of_text(row)] = made.text_levels(own_M[:samples])[0]
        if self.keyframes is not None:
            blocks[TOKENS] = blocks[TOKENS] + 0 * self.keyframes
        return blocks

    def conditions(
        self, blocks: Blocks, batch: PackedBatch, layout: StreamLayout
    ) -> LayerConditions:
        streams, context = layout.streams, self.context
        device = batch.segment_T.device
        names = [rows(row) for row in ROWS for rows in (rows_of_table, rows_between, rows_of_text)]
        heard_T1 = streams[SOUND_TOKENS].position_TA
        seconds = {
            TOKENS: batch.position_TA[:, :1],
            SOUND_TOKENS: CellMiddles.of_sound(heard_T1, self.model.sound_rate),
        }
        times = {row: self.time_rotary(position_T1) for row, position_T1 in seconds.items()}
        angles = {TOKENS: self.rotary(batch.position_TA), SOUND_TOKENS: times[SOUND_TOKENS]}
        token_rows = {
            row: TokenRow.of_stream(one, attended=one.num_tokens) for row, one in streams.items()
        }
        video, sound = token_rows[TOKENS], token_rows[SOUND_TOKENS]
        meet: Any = {"context": context, "device": device}
        crossings = {
            TOKENS: Crossing(
                exchange=row_exchange(video, sound, **meet),
                angles_TK=times[TOKENS],
                key_angles_SK=times[SOUND_TOKENS],
                has_keys_T1=layout.hears_T1,
            ),
            SOUND_TOKENS: Crossing(
                exchange=row_exchange(sound, video, **meet),
                angles_TK=times[SOUND_TOKENS],
                key_angles_SK=times[TOKENS],
            ),
        }
        return LayerConditions(
            timestep=TimestepConditioning(
                t_emb_ND=blocks[_t_emb(TOKENS)],
                of_rows={name: blocks[name] for name in names if name in blocks},
            ),
            rows={
                row: RowConditions(per_sample=layout.per_sample[row], angles_TK=angles[row])
                for row in streams
            },
            meetings={
                (row,): context.exchange(one, rows=len(one.segment_T))
                for row, one in streams.items()
            },
            keys={ROWS[row][1]: self._caption(blocks, batch, row, layout) for row in streams},
            crossings=crossings,
            of_parts={CAPTIONS: self._owners(batch)},
        )

    def _caption(
        self, blocks: Blocks, batch: PackedBatch, row: str, layout: StreamLayout
    ) -> AttendedRows:
        stream, starts = layout.streams[row], self._text_starts(batch, row)
        texts = [(first, stop - first) for first, stop in pairwise(starts)]
        total, device = len(stream.segment_T), stream.segment_T.device
        spans = Spans.of(stream.shared_spans, texts, total=total, device=device)
        return AttendedRows(rows_LE=blocks[_text(row)], spans=spans)

    def _owners(self, batch: PackedBatch) -> Mapping[str, PerSample]:
        """For each text, by name, the row of the modulation table that each of its tokens gets.

        This is the index of the token's sample, or 0 for all tokens if the modulation of captions
        does not depend on the timestep.
        """
        found = dict[str, PerSample]()
        told = self.model.text_modulation is TextModulation.TOLD
        for row, (_, text) in ROWS.items():
            lengths = torch.tensor([b - a for a, b in pairwise(self._text_starts(batch, row))])
            samples_L = torch.arange(len(lengths)).repeat_interleave(lengths) * told
            found[text] = self.per_sample(to_device(samples_L, batch.segment_T.device))
        return found

    def head(self, blocks: Blocks, batch: PackedBatch, layout: StreamLayout) -> Output:
        tables = {TOKENS: self.modulate_out, SOUND_TOKENS: self.sound_modulate_out}
        linears = {TOKENS: self.proj_out, SOUND_TOKENS: self.sound_proj_out}
        made = dict[str, Tensor]()
        for row, table in tables.items():
            (adaln,) = table.of_embedding(blocks[_t_emb(row)])
            # The last norms are LayerNorms.
            layer_norm = replace(layout.per_sample[row], rms=False)
            x_TD = adaln.modulate(blocks[row], layer_norm)
            made[ROWS[row][0]] = self.all_tokens(linears[row](x_TD))
        if SOUND in batch.others:
            return made
        return made[LATENTS] + 0 * made[SOUND].sum()


def _t_emb(row: str) -> str:
    return f"{row}_t_emb"


def _text(row: str) -> str:
    return f"{row}_text"
