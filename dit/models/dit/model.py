"""The diffusion transformer."""

# T packed tokens, N samples, C patch features, D model width, L text tokens, E text width

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dit.batch import PackedBatch
from dit.config import Recompute, RecomputeMethod
from dit.models.dit.adaln import LevelEmbedding, Modulation
from dit.models.dit.config import DitConfig, ExtraPosition
from dit.models.dit.layer import Conditions, DiTLayer, Steer
from dit.models.layers.activation_offload import on_host
from dit.models.layers.attention import Spans
from dit.models.layers.compile import check_compiler
from dit.models.layers.context_parallel import Context
from dit.models.layers.parallel_linear import Replicated, dtype, transformer_config
from dit.models.layers.per_sample import Owners
from dit.models.layers.rope import LearnablePositions, Rotary
from dit.models.layers.transformer_engine import check_engine, fp8_products


class Layers(TransformerBlock):
    """The layers of this pipeline stage, or of one of its virtual stages.

    Megatron-Core builds them, numbers them over all stages and shards their checkpoint; its own
    forward has no place for the conditions of a DiT.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: DitConfig,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
    ):
        count = get_num_layers_to_build(config, vp_stage, groups.pp.rank())
        spec = ModuleSpec(module=DiTLayer, params={"model": model})
        submodules = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=None)
        super().__init__(config, submodules, pg_collection=groups, vp_stage=vp_stage)
        self.model = model

    def forward(self, h_TD: Tensor, conditions: Conditions) -> Tensor:  # type: ignore[override]
        for first, last in self._groups():
            if self._recomputed(first):
                span = (conditions, first, last)
                h_TD = checkpoint(self._run, h_TD, *span, use_reentrant=False)
                continue
            away = self.training and first < self.model.cpu_offloading_num_layers
            with on_host(self.layers[first], conditions) if away else nullcontext():
                h_TD = self._run(h_TD, conditions, first, last)
        return h_TD

    def _run(self, h_TD: Tensor, conditions: Conditions, first: int, last: int) -> Tensor:
        with fp8_products(self.model):  # here, for recomputation comes back to here
            for layer in self.layers[first:last]:
                h_TD = layer(h_TD, conditions)
        return h_TD

    def _groups(self) -> list[tuple[int, int]]:
        uniform = self.model.recompute_method is RecomputeMethod.UNIFORM
        size = self.model.recompute_num_layers if self._full() and uniform else 1
        bounds = [*range(0, len(self.layers), size), len(self.layers)]
        return list(pairwise(bounds))

    def _full(self) -> bool:
        return self.training and self.model.recompute_granularity is Recompute.FULL

    def _recomputed(self, first: int) -> bool:
        block = self.model.recompute_method is RecomputeMethod.BLOCK
        return self._full() and (not block or first < self.model.recompute_num_layers)


class DiT(MegatronModule):
    """Noisy tokens, noise level and text of a pack -> raw network output for each token.

    Every sample of the pack has its own level, positions and text, and sees no other sample.

    Of a pipeline's stages the first embeds tokens, levels and positions; the hidden states travel
    on with what was made of levels, positions and text, so no stage has a copy of those weights.
    """

    def __init__(
        self, model: DitConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        check_engine(model)
        if model.compile:
            check_compiler()
        config = transformer_config(model)
        super().__init__(config=config)
        self.model = model
        self.groups = groups
        # What Megatron-Core's schedules ask of any model.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.vp_stage = vp_stage
        last = model.virtual_stages - 1
        self.pre_process = is_pp_first_stage(groups.pp) and vp_stage in (None, 0)
        self.post_process = is_pp_last_stage(groups.pp) and vp_stage in (None, last)
        self.input_tensor: Tensor | None = None  # of the stage before
        self.rotary = Rotary(model)
        self.context = Context(group=groups.cp, comm=model.cp_comm_type)
        volume = model.patch_temporal * model.patch_spatial**2
        self.mask_features = volume if model.concat_padding_mask else 0
        width = model.hidden_size
        self.positions = self.text_proj = None
        if self.pre_process:
            inputs = model.patch_features + self.mask_features
            self.patches = Replicated(inputs, width, config=config)
            self.level = LevelEmbedding(config)
            if model.extra_pos_embed is ExtraPosition.LEARNABLE:
                self.positions = LearnablePositions(model, config)
            if model.crossattn_proj_size is not None:
                self.text_proj = TextProjection(model)
        self.decoder = Layers(config, model, groups, vp_stage)
        if self.post_process:
            self.modulate_out = Modulation(config, rank=model.adaln_lora_dim, gated=False)
            self.proj_out = Replicated(width, model.patch_features, config=config)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Takes what the stage before hands on; Megatron-Core's schedules call it."""
        self.input_tensor = input_tensor[0]

    def hidden_shape(self, batch: PackedBatch) -> list[int]:
        """Shape of what one stage hands on to the next of a pack."""
        tokens = len(batch.segment_T)
        if self.config.sequence_parallel:
            tokens //= self.groups.tp.size()
        length = self.model.text_pad_to
        text = len(batch.text_LE) if length is None else length * batch.num_samples
        sizes = _rows(self.model, tokens=tokens, samples=batch.num_samples, text=text)
        return [sum(sizes), 1, self.model.hidden_size]

    def forward(self, x_TC: Tensor, level_N: Tensor, batch: PackedBatch) -> Tensor:
        """Raw network output [T, C], float32; its value on padding tokens means nothing.

        Of a stage that is not the last: what the next one takes.
        """
        batch = pad_text(batch, self.model.text_pad_to)
        segment_T = self._my_tokens(batch.segment_T)
        owners = Owners.of(segment_T, compiled=self.model.compile)
        h_TD, steer = (
            self.enter(x_TC, level_N, batch)
            if self.pre_process
            else _unload(self.input_tensor, self.model, batch, len(owners.segment_T))
        )
        h_TD = self.decoder(h_TD, self.conditions(steer, batch, owners))
        if not self.post_process:
            return _load(h_TD, steer)
        h_TD, _ = self.modulate_out(h_TD, steer.wave_ND, steer.offset_NX, owners)
        x_TC = self.proj_out(h_TD)
        if self.config.sequence_parallel:
            # Each tensor rank computes the loss of all tokens: a gradient is not to be summed.
            x_TC = gather_from_sequence_parallel_region(
                x_TC, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return x_TC.float()

    def _my_tokens(self, x_T: Tensor) -> Tensor:
        """The tokens, as rows of any width, that this rank holds between two matrices."""
        if not self.config.sequence_parallel:
            return x_T
        return scatter_to_sequence_parallel_region(x_T, group=self.groups.tp)

    def enter(self, x_TC: Tensor, level_N: Tensor, batch: PackedBatch) -> tuple[Tensor, Steer]:
        """The first hidden states, and what is learnt of levels, positions and text."""
        x_TC = self._my_tokens(nn.functional.pad(x_TC, (0, self.mask_features)))
        wave_ND, offset_NX = self.level(level_N)
        position_TD = None
        if self.positions is not None:
            fps_T = self._my_tokens(batch.fps_N[batch.segment_T])
            position_TD = self.positions(self._my_tokens(batch.position_T3), fps_T)
            position_TD = position_TD.to(self.config.params_dtype)
        text_LE = None
        if self.text_proj is not None:
            text_LE = self.text_proj(batch.text_LE.to(self.config.params_dtype))
        steer = Steer(
            wave_ND=wave_ND, offset_NX=offset_NX, position_TD=position_TD, text_LE=text_LE
        )
        return self.patches(x_TC.to(self.config.params_dtype)), steer

    def conditions(self, steer: Steer, batch: PackedBatch, owners: Owners) -> Conditions:
        """What every layer sees beside the tokens."""
        cos_TK, sin_TK = self.rotary(batch.position_T3)
        rows, ends = len(batch.segment_T), batch.text_starts
        captions = [(a, b - a) for a, b in pairwise(ends)]
        text_LE = batch.text_LE.to(self.config.params_dtype)
        return Conditions(
            steer=steer,
            owners=owners,
            text_LE=text_LE if steer.text_LE is None else steer.text_LE,
            cos_TK=cos_TK,
            sin_TK=sin_TK,
            self_spans=self.context.spans(batch, rows=rows),
            self_order=self.context.order(batch, rows=rows),
            cross_spans=Spans.of(batch.shared_spans, captions, total=rows, device=text_LE.device),
        )


class TextProjection(nn.Linear):
    """Text of any width -> the width that the layers attend to, with a GELU (Cosmos 2.5)."""

    def __init__(self, model: DitConfig):
        super().__init__(model.crossattn_emb_size, model.text_width, dtype=dtype(model))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(input))


def _load(h_TD: Tensor, steer: Steer) -> Tensor:
    """Hidden states and what steers them, as rows [rows, 1, D]: Megatron-Core sends three axes."""
    width = h_TD.shape[-1]
    parts = [h_TD, steer.wave_ND, steer.offset_NX.reshape(-1, width)]
    parts += [] if steer.position_TD is None else [steer.position_TD]
    if steer.text_LE is not None:  # its width is its own: laid end to end, and filled up
        flat = steer.text_LE.flatten()
        parts += [nn.functional.pad(flat, (0, -len(flat) % width)).view(-1, width)]
    return torch.cat(parts)[:, None]


def _rows(model: DitConfig, *, tokens: int, samples: int, text: int) -> list[int]:
    """How many rows of `_load` are hidden states, levels, offsets, positions and text."""
    learnable = model.extra_pos_embed is ExtraPosition.LEARNABLE
    numbers = text * (model.crossattn_proj_size or 0)
    positions = tokens if learnable else 0
    return [tokens, samples, 3 * samples, positions, -(-numbers // model.hidden_size)]


def _unload(
    rows: Tensor | None, model: DitConfig, batch: PackedBatch, tokens: int
) -> tuple[Tensor, Steer]:
    """The inverse of `_load`."""
    assert rows is not None
    samples, learnable = batch.num_samples, model.extra_pos_embed is ExtraPosition.LEARNABLE
    numbers = len(batch.text_LE) * (model.crossattn_proj_size or 0)
    sizes = _rows(model, tokens=tokens, samples=samples, text=len(batch.text_LE))
    h_TD, wave_ND, offset_XD, position_TD, text_XD = rows[:, 0].split(sizes)
    return h_TD, Steer(
        wave_ND=wave_ND,
        offset_NX=offset_XD.reshape(samples, -1),
        position_TD=position_TD if learnable else None,
        text_LE=text_XD.flatten()[:numbers].view(len(batch.text_LE), -1) if numbers else None,
    )


def pad_text(batch: PackedBatch, length: int | None) -> PackedBatch:
    """Appends zero vectors to every caption up to `length` tokens (null: leaves them alone).

    Cosmos's published weights attend to this padding.

    Raises:
        ValueError: a caption is longer.
    """
    if length is None:
        return batch
    parts, width = [], batch.text_LE.shape[-1]
    for sample, (start, stop) in enumerate(pairwise(batch.text_starts)):
        missing = length - (stop - start)
        if missing < 0:
            raise ValueError(
                f"the caption of sample {batch.keys[sample]!r} has {stop - start} tokens, more than"
                f" model.text_pad_to={length}; raise it, or encode shorter captions"
            )
        parts += [batch.text_LE[start:stop], batch.text_LE.new_zeros(missing, width)]
    starts = tuple(range(0, length * batch.num_samples + 1, length))
    return replace(batch, text_LE=torch.cat(parts), text_starts=starts)
