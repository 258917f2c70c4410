"""The DiT of Cosmos: self-attention of latents, cross-attention to text, low-rank adaLN."""
# T packed tokens, N samples, M timesteps, C patch features, D model width, K head width
# L text tokens, E text width, I width of the text in the shards if there is a text projection
# A axes of a position, X = 3 * D numbers that are added to every modulation

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dit.batch import TEXT, PackedBatch
from dit.models.dit.family import DitConfig, ExtraPosition, LowRankModulation, dit_stack
from dit.models.layer_spec import TOKENS
from dit.models.layers.modulation import AdaLNModule, TimestepConditioning, TimestepEmbedding
from dit.models.layers.parallel_linear import (
    BuildContext,
    Replicated,
    WholeLinear,
    dtype,
    sees_part_of_tokens,
    transformer_config,
)
from dit.models.layers.per_sample import PerSample, look_up
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.cross_transformer import (
    CrossTransformer,
    axis_widths,
    filled_up,
    padded_rows,
)
from dit.models.stacks.parts import LayerConditions, RunningPart
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.token_ids import TOKEN_IDS

_STATES = "states"
"""Key in `texts` of a prepared pack: the text states to which the conditioner attends."""


class DiT(CrossTransformer):
    """Denoiser with cross-attention to text: maps each noisy token of a pack to an output.

    The objective defines the output: velocity, or raw output of EDM. The arithmetic is that of
    Diffusers' `CosmosTransformer3DModel`.
    """

    token_blocks = ("position",)

    def __init__(
        self, model: DitConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        super().__init__(config, model, groups, vp_stage, [dit_stack(model)])
        self.rotary = Rotary(model)
        width = model.hidden_size
        self.positions = self.text_proj = self.conditioner = None
        if self.pre_process:
            inputs = model.patch_features + model.mask_features
            self.patches = Replicated(inputs, width, config=config, token_row=TOKENS)
            self.level = TimestepEmbedding(config)
            if model.extra_pos_embed is ExtraPosition.LEARNABLE:
                self.positions = LearnablePositions(model, config)
            if model.projects_text:
                self.text_proj = TextProjection(model)
            if model.trains_conditioner:
                from dit.models.dit.conditioner_layers import Conditioner

                self.conditioner = Conditioner(model)
        self.build_stacks()
        if self.post_process:
            context = BuildContext(model=model, config=config, groups=groups)
            low_rank = LowRankModulation(model.adaln_lora_dim)
            self.modulate_out = LowRankAdaLN(context, width, low_rank, gated=False)
            self.proj_out = Replicated(
                width, model.output_features, config=config, token_row=TOKENS
            )

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        """A copy of `batch` whose main text is padded to `model.text_pad_to` tokens.

        With a trained conditioner the main text becomes the token ids, because the conditioner
        outputs a row for each id, and the text states move to the key `_STATES` of `texts`.
        """
        if self.model.trains_conditioner:
            states_SI, tokens_L2 = batch.text_LE, batch.texts[TOKEN_IDS]
            batch = batch.with_text(_STATES, states_SI, batch.text_starts)
            batch = batch.with_text(TEXT, tokens_L2, batch.text_offsets[TOKEN_IDS])
        return super().prepared(batch)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        model, width, levels = self.model, self.config.hidden_size, batch.num_levels
        shapes = {"t_emb": (levels, width), "adaln_shift": (levels, 3 * width)}
        if model.extra_pos_embed is ExtraPosition.LEARNABLE:
            shapes["position"] = (self.hidden_rows(batch)["hidden"], width)
        if model.projects_text or model.trains_conditioner:
            # Also works for unprepared packs, from which stages compute the sizes they receive.
            made_of = TOKEN_IDS if model.trains_conditioner else TEXT
            shapes["text"] = (padded_rows(batch, model.text_pad_to, made_of), model.text_width)
        return shapes

    def embed(
        self,
        x_TC: Tensor,
        level_M: Tensor,
        batch: PackedBatch,
        layout: PerSample,  # noqa: ARG002
    ) -> Blocks:
        x_TC = self.my_tokens(self._with_masks(x_TC, batch))
        t_emb_MD, adaln_shift_MX = self.level(level_M)
        blocks = {"t_emb": t_emb_MD, "adaln_shift": adaln_shift_MX}
        if self.positions is not None:
            fps_T = self.my_tokens(batch.fps_N[batch.segment_T])
            position_TD = self.positions(self.my_tokens(batch.position_TA), fps_T)
            blocks["position"] = position_TD.to(self.config.params_dtype)
        if self.text_proj is not None:
            blocks["text"] = self.text_proj(batch.text_LE.to(self.config.params_dtype))
        if self.conditioner is not None:
            blocks["text"] = self._conditioned(batch)
        return blocks | {"hidden": self.patches(x_TC.to(self.config.params_dtype))}

    def _conditioned(self, batch: PackedBatch) -> Tensor:
        """The conditioner's output [L, E] for all captions, each padded to `text_pad_to` rows."""
        assert self.conditioner is not None
        tokens, states = batch.text_offsets[TOKEN_IDS], batch.text_offsets[_STATES]
        states_SI = batch.texts[_STATES].to(self.config.params_dtype)
        made_LE = self.conditioner(states_SI, batch.texts[TOKEN_IDS], states, tokens)
        return filled_up(made_LE, tokens, self.model.text_pad_to)

    def _with_masks(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:
        """`x_TC` with a condition mask (1 on given frames) and a padding mask (0) appended."""
        if self.model.condition_mask:
            given_T1 = (batch.is_real_T & ~batch.is_target_T)[:, None].to(x_TC.dtype)
            x_TC = torch.cat((x_TC, given_T1.expand(-1, self.model.patch_volume)), dim=1)
        zeros = self.model.patch_volume if self.model.concat_padding_mask else 0
        return nn.functional.pad(x_TC, (0, zeros))

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> LayerConditions:
        text_LD = blocks.get("text", batch.text_LE.to(self.config.params_dtype))
        own = {name: blocks[name] for name in self.token_blocks if name in blocks}
        return self.cross_conditions(
            batch, layout, timestep=_timestep(blocks), text_LD=text_LD, of_parts=own
        )

    def head(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Tensor:  # noqa: ARG002
        (adaln,) = self.modulate_out(_timestep(blocks))
        return self.all_tokens(self.proj_out(adaln.modulate(blocks["hidden"], layout)))


def _timestep(blocks: Blocks) -> TimestepConditioning:
    return TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=blocks["adaln_shift"])


class LowRankAdaLN(AdaLNModule):
    """Low-rank adaLN: a modulation by two linears, plus a vector that all layers share."""

    def __init__(
        self, context: BuildContext, width: int, spec: LowRankModulation, *, gated: bool = True
    ):
        super().__init__(context.config, parts=1, gated=gated)
        self.linear_1 = Replicated(width, spec.rank, config=context.config)
        self.linear_2 = Replicated(spec.rank, self.each * width, config=context.config)

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        assert timestep.adaln_shift_NX is not None
        rows_NX = self.linear_2(self.linear_1(nn.functional.silu(timestep.t_emb_ND)))
        return rows_NX + timestep.adaln_shift_NX[:, : rows_NX.shape[-1]]


class AddingPositions(RunningPart):
    """Returns the learnable positions, which the layer adds to its tokens."""

    def outputs(
        self,
        layer: nn.Module,  # noqa: ARG002
        inputs: Sequence[Tensor],  # noqa: ARG002
        conditions: LayerConditions,
    ) -> Sequence[Tensor]:
        return (conditions.of_parts["position"],)


class TextProjection(WholeLinear):
    """Projects text states [L, I] to [L, E] by a linear and a GELU (Cosmos 2.5)."""

    def __init__(self, model: DitConfig):
        super().__init__(model.crossattn_emb_size, model.text_width, dtype=dtype(model))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(input))


class Rotary(RotaryTable):
    """Rotary embedding of (frame, row, column), with an NTK scale for each axis (Cosmos)."""

    def __init__(self, model: DitConfig):
        widths = axis_widths(model.hidden_size // model.num_attention_heads)
        scales = zip(widths, model.rope_scale, strict=True)
        super().__init__(widths, [10_000.0 * scale ** (w / (w - 2)) for w, scale in scales])


class LearnablePositions(nn.Module):
    """Learnable positions of Cosmos: the sum of three tables, scaled to a root mean square of 1."""

    def __init__(self, model: DitConfig, config: TransformerConfig):
        super().__init__()
        frames, rows, columns = model.max_size
        width, spatial = model.hidden_size, model.patch_spatial
        self.base_fps = model.base_fps

        # In the dtype of the model: Megatron-Core's distributed optimizer mixes up the shards of a
        # parameter group with two dtypes.
        def table(size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, width, dtype=config.params_dtype))

        self.pos_emb_t = table(frames // model.patch_temporal)
        self.pos_emb_h = table(rows // spatial)
        self.pos_emb_w = table(columns // spatial)
        sees_part_of_tokens(self, config)

    def forward(self, position_TA: Tensor, fps_T: Tensor) -> Tensor:
        """The embedding [T, D], float32, of positions (frame, row, column).

        Rotary positions scale the frame by base_fps / fps. Tables are indexed by unscaled frames,
        so the frame is multiplied by `fps_T` / base_fps again.
        """
        frame_T = position_TA[:, 0]
        if self.base_fps is not None:
            pace_T = torch.where(fps_T.isnan(), 1.0, fps_T / self.base_fps)
            frame_T = (frame_T * pace_T).round()
        frame_T, row_T, column_T = (x.long() for x in (frame_T, *position_TA[:, 1:].unbind(1)))
        tables = (self.pos_emb_t, frame_T), (self.pos_emb_h, row_T), (self.pos_emb_w, column_T)
        sum_TD = torch.stack([look_up(*one).float() for one in tables]).sum(0)
        norm_T1 = torch.linalg.vector_norm(sum_TD, dim=-1, keepdim=True)
        return sum_TD / (1e-6 + norm_T1 * sum_TD.shape[-1] ** -0.5)
