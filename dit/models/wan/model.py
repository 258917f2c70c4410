"""Wan: self-attention, cross-attention to text and image, table modulation."""
# T packed tokens, N samples, M timesteps, C patch features, D model width, K head width
# L text tokens, E width of an encoder, I image states, S image states of a sample, X any width

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from dit.batch import PackedBatch
from dit.models.attention import cube_attention
from dit.models.attention.choice import attention_for
from dit.models.attention.cubes import Cubes
from dit.models.attention.spans import Spans
from dit.models.layer_spec import TOKENS, AttentionSpec
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.modulation import TableAdaLN, TimestepConditioning, sinusoid
from dit.models.layers.packed_attention import AttendedRows, RowConditions, SelfAttention
from dit.models.layers.parallel_linear import (
    BuildContext,
    Replicated,
    WholeLinear,
    dtype,
    split_linear,
    transformer_config,
)
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.cross_transformer import (
    CrossTransformer,
    TextEmbedding,
    axis_widths,
    padded_rows,
    spans_of,
)
from dit.models.stacks.parts import LayerConditions, SelfAttending
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.models.wan.family import IMAGE, MASK_CHANNELS, ImageCondition, WanConfig, wan_stack
from dit.pack_wire import to_device


class WanNetwork(CrossTransformer):
    """Denoiser of Wan: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `WanTransformer3DModel`.
    """

    def __init__(
        self, model: WanConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        super().__init__(config, model, groups, vp_stage, [wan_stack(model)])
        self.sparse_share = model.share_schedule.last
        width = model.hidden_size
        widths = axis_widths(width // model.num_attention_heads)
        # Angles in float64, as in Diffusers.
        self.rotary = RotaryTable(widths, (10_000.0,) * 3, dtype=torch.float64)
        self.image_embedder = None
        of_tokens: Any = {"config": config, "token_row": TOKENS}
        if self.pre_process:
            self.patches = Replicated(model.input_features, width, **of_tokens, bias=True)
            self.level = LevelEmbedding(model, config)
            self.text_embedder = TextEmbedding(model)
            if model.image_embed_size is not None:
                self.image_embedder = ImageEmbedding(model)
        self.build_stacks()
        if self.post_process:
            self.modulate_out = TableAdaLN(config, width, parts=1, gated=False)
            self.proj_out = Replicated(width, model.output_features, **of_tokens, bias=True)

    def at_step(self, step: int) -> None:
        self.sparse_share = self.model.share_schedule.at(step)

    def step_values(self) -> dict[str, float]:
        return {"sparse_share": float(self.sparse_share)} if self.model.sparse_attention else {}

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        width, levels = self.config.hidden_size, batch.num_levels
        text = padded_rows(batch, self.model.text_pad_to)
        shapes = {"t_emb": (levels, width), "shared": (levels, 6 * width), "text": (text, width)}
        if self.model.image_embed_size is not None:
            shapes["image"] = (batch.text_offsets[IMAGE][-1], width)
        return shapes

    def embed(
        self,
        x_TC: Tensor,
        level_M: Tensor,
        batch: PackedBatch,
        layout: PerSample,  # noqa: ARG002
    ) -> Blocks:
        dtype = self.config.params_dtype
        t_emb_MD, shared_MX = self.level(level_M)
        text_LD = self.text_embedder(batch.text_LE.to(dtype))
        blocks = {"t_emb": t_emb_MD, "shared": shared_MX, "text": text_LD}
        if self.image_embedder is not None:
            blocks["image"] = self.image_embedder(batch.texts[IMAGE].to(dtype))
        x_TC = self.my_tokens(self._with_condition(x_TC.to(dtype), batch))
        return blocks | {"hidden": self.patches(x_TC)}

    def _with_condition(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:
        """`x_TC` with the mask of given frames and the condition latent as additional channels."""
        if not self.model.condition_channels:
            return x_TC
        assert batch.condition_TC is not None
        mask_TC = given_mask(batch, self.model)
        return torch.cat((x_TC, mask_TC.to(x_TC), batch.condition_TC.to(x_TC)), dim=1)

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> LayerConditions:
        others = {}
        if "image" in blocks:
            spans = spans_of(batch, batch.text_offsets[IMAGE])
            others[IMAGE] = AttendedRows(rows_LE=blocks["image"], spans=spans)
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=blocks["shared"])
        text_LD = blocks["text"]
        conditions = self.cross_conditions(
            batch, layout, timestep=timestep, text_LD=text_LD, **others
        )
        return self._with_cubes(conditions, batch) if self.model.sparse_attention else conditions

    def _with_cubes(self, conditions: LayerConditions, batch: PackedBatch) -> LayerConditions:
        """`conditions` with the cubes of all samples, for sparse attention."""
        (exchange,) = conditions.meetings.values()
        spans = exchange.spans
        at = {"total": spans.total, "device": spans.device}
        cubes = Cubes.of(batch.grids, batch.starts, share=self.sparse_share, **at)
        exchange = replace(exchange, spans=replace(spans, cubes=cubes))
        return replace(conditions, meetings={(TOKENS,): exchange})

    def head(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Tensor:  # noqa: ARG002
        (adaln,) = self.modulate_out.of_embedding(blocks["t_emb"])
        return self.all_tokens(self.proj_out(adaln.modulate(blocks["hidden"], layout)))


class CubeAttention(SelfAttention):
    """Video Sparse Attention: to tokens of chosen cubes, plus a gate times that to cubes' means."""

    def __init__(self, context: BuildContext, spec: AttentionSpec, *, output: bool = True):
        super().__init__(context, spec, output=output)
        of_input: Any = {"axis": 0, "context": context, "bias": spec.bias}
        self.linear_gate = split_linear(spec.width, spec.width, **of_input)

    def forward(self, x_TD: Tensor, row: RowConditions, exchange: TokenExchange) -> Tensor:
        qkv = self.qkv(x_TD, row)
        gate_THK = self.linear_gate(x_TD).unflatten(-1, (-1, self.head_width))
        out_THK = self.context.attend(self._attend, (*qkv, gate_THK), exchange)
        return self.linear_proj(out_THK.flatten(1))

    def _attend(
        self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, gate_THK: Tensor, spans: Spans
    ) -> Tensor:
        kernel = attention_for(self.backend, q_THK)
        attend = partial(cube_attention.attend_cubes, attend=kernel)
        return self.attended(attend, (q_THK, k_THK, v_THK), gate_THK, spans)


class AttendingCubes(SelfAttending):
    """Runs Video Sparse Attention (`AttendCubes`)."""

    def attention(self, context: BuildContext, *, output: bool) -> SelfAttention:
        return CubeAttention(context, self.part.attention, output=output)


class LevelEmbedding(nn.Module):
    """Maps timesteps [M] to (timestep embedding [M, D], shared modulation [M, 6 D])."""

    def __init__(self, model: WanConfig, config: TransformerConfig):
        super().__init__()
        width = model.hidden_size
        # In float32, as in Diffusers: bfloat16 does not distinguish nearby timesteps in [0, 1000].
        self.linear_1 = Float32Linear(model.freq_dim, width, config=config, bias=True)
        self.linear_2 = Float32Linear(width, width, config=config, bias=True)
        self.linear_out = Replicated(width, 6 * width, config=config, bias=True)

    def forward(self, level_M: Tensor) -> tuple[Tensor, Tensor]:
        wave_MX = sinusoid(level_M, self.linear_1.in_features)
        t_emb_MD = self.linear_2(silu(self.linear_1(wave_MX))).to(self.linear_out.weight.dtype)
        return t_emb_MD, self.linear_out(silu(t_emb_MD))


class Float32Linear(Replicated):
    """A linear of timestep embeddings that computes in float32, whatever the dtype of weights."""

    def product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.float(), self.bias.float())


class ImageEmbedding(nn.Module):
    """Maps the image encoder's states [I, E] to states [I, D] for cross-attention.

    Every tensor rank computes all states, also with sequence parallelism, so each rank has the
    whole gradient of the weights, and gradients are not summed over ranks.
    """

    def __init__(self, model: WanConfig):
        super().__init__()
        inputs, made, rows = model.image_embed_size, dtype(model), model.image_embed_length
        assert inputs is not None
        self.norm_in = nn.LayerNorm(inputs, eps=1e-5, dtype=made)
        self.linear_1 = WholeLinear(inputs, inputs, dtype=made)
        self.linear_2 = WholeLinear(inputs, model.hidden_size, dtype=made)
        self.norm_out = nn.LayerNorm(model.hidden_size, eps=1e-5, dtype=made)
        self.positions = None
        if model.image_embed_positions:
            self.positions = nn.Parameter(torch.zeros(rows, inputs, dtype=made))

    def forward(self, image_IE: Tensor) -> Tensor:
        if self.positions is not None:
            rows = self.positions.shape[0]
            image_IE = (image_IE.unflatten(0, (-1, rows)) + self.positions).flatten(0, 1)
        return self.norm_out(self.linear_2(gelu(self.linear_1(self.norm_in(image_IE)))))


def given_mask(batch: PackedBatch, model: WanConfig) -> Tensor:
    """The mask of given video frames, [T, mask channels * patch volume], for `batch`.

    Features of a token are in the order (c, t, h, w). Channel k of latent frame j stands for video
    frame 4 j - 3 + k; all channels of latent frame 0 stand for video frame 0. Source:
    `prepare_latents` of `WanImageToVideoPipeline`.
    """
    frames, cells = model.patch_temporal, model.patch_spatial**2
    inner = torch.arange(frames, device=batch.position_TA.device)
    frame_Tt = batch.position_TA[:, :1].long() * frames + inner
    given_Tct = (frame_Tt == 0)[:, None].repeat(1, MASK_CHANNELS, 1)
    if model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME:
        last = [grid[0] * frames - 1 for grid in batch.grids]
        last_N = to_device(torch.tensor(last), frame_Tt.device)
        given_Tct[:, -1] |= frame_Tt == last_N[batch.segment_T, None]
    return given_Tct[..., None].expand(-1, -1, -1, cells).flatten(1)
