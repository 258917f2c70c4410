"""The diffusion transformer."""

# T packed tokens, N samples, C patch features, D model width, L text tokens, E text width

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dit.batch import PackedBatch
from dit.config import ExtraPosition, ModelConfig, Recompute, RecomputeMethod
from dit.model.attention import Spans
from dit.model.layer import Conditions, DiTLayer
from dit.model.linears import Replicated, transformer_config
from dit.model.modulation import LevelEmbedding, Modulation
from dit.model.positions import LearnablePositions, Rotary


class Layers(TransformerBlock):
    """The layers of this pipeline stage.

    Megatron-Core builds them, numbers them over all stages and shards their checkpoint; its own
    forward has no place for the conditions of a DiT.
    """

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection
    ):
        count = get_num_layers_to_build(config, pp_rank=groups.pp.rank())
        spec = ModuleSpec(module=DiTLayer, params={"model": model})
        submodules = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=None)
        super().__init__(config, submodules, pg_collection=groups)
        self.model = model

    def forward(self, h_TD: Tensor, conditions: Conditions) -> Tensor:  # type: ignore[override]
        for first, last in self._groups():
            h_TD = (
                checkpoint(self._run, h_TD, conditions, first, last, use_reentrant=False)
                if self._recomputed(first)
                else self._run(h_TD, conditions, first, last)
            )
        return h_TD

    def _run(self, h_TD: Tensor, conditions: Conditions, first: int, last: int) -> Tensor:
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
    """

    def __init__(self, model: ModelConfig, groups: ProcessGroupCollection):
        config = transformer_config(model)
        super().__init__(config=config)
        self.model = model
        # What Megatron-Core's schedules ask of any model.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        width, volume = model.hidden_size, model.patch_temporal * model.patch_spatial**2
        self.mask_features = volume if model.concat_padding_mask else 0
        inputs = model.patch_features + self.mask_features
        self.rotary = Rotary(model)
        self.patches = Replicated(inputs, width, config=config)
        self.level = LevelEmbedding(config)
        learnable = model.extra_pos_embed is ExtraPosition.LEARNABLE
        self.positions = LearnablePositions(model, config.params_dtype) if learnable else None
        self.decoder = Layers(config, model, groups)
        self.modulate_out = Modulation(config, rank=model.adaln_lora_dim, gated=False)
        self.proj_out = Replicated(width, model.patch_features, config=config)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Takes the hidden states of the stage before; Megatron-Core's schedules call it."""
        self.decoder.input_tensor = input_tensor[0]

    def forward(self, x_TC: Tensor, level_N: Tensor, batch: PackedBatch) -> Tensor:
        """Raw network output [T, C], float32; its value on padding tokens means nothing."""
        batch = pad_text(batch, self.model.text_pad_to)
        x_TC = torch.nn.functional.pad(x_TC, (0, self.mask_features))
        h_TD = self.patches(x_TC.to(self.config.params_dtype))
        conditions = self.conditions(level_N, batch)
        h_TD = self.decoder(h_TD, conditions)
        steer = (conditions.wave_ND, conditions.offset_NX, conditions.segment_T)
        h_TD, _ = self.modulate_out(h_TD, *steer)
        return self.proj_out(h_TD).float()

    def conditions(self, level_N: Tensor, batch: PackedBatch) -> Conditions:
        """What every layer sees beside the tokens."""
        wave_ND, offset_NX = self.level(level_N)
        cos_TK, sin_TK = self.rotary(batch.position_T3)
        position_TD = None
        if self.positions is not None:
            fps_T = batch.fps_N[batch.segment_T]
            position_TD = self.positions(batch.position_T3, fps_T).to(self.config.params_dtype)
        return Conditions(
            wave_ND=wave_ND,
            offset_NX=offset_NX,
            segment_T=batch.segment_T,
            text_LE=batch.text_LE.to(self.config.params_dtype),
            cos_TK=cos_TK,
            sin_TK=sin_TK,
            position_TD=position_TD,
            self_spans=_self_spans(batch),
            cross_spans=_cross_spans(batch),
        )


def _self_spans(batch: PackedBatch) -> Spans:
    starts, lengths = batch.starts[:-1], batch.num_tokens
    return Spans(
        starts=starts,
        lengths=lengths,
        key_starts=starts,
        key_lengths=lengths,
        total=batch.starts[-1],
        device=batch.latent_TC.device,
    )


def _cross_spans(batch: PackedBatch) -> Spans:
    return Spans(
        starts=batch.starts[:-1],
        lengths=batch.num_tokens,
        key_starts=batch.text_starts[:-1],
        key_lengths=tuple(b - a for a, b in pairwise(batch.text_starts)),
        total=batch.starts[-1],
        device=batch.latent_TC.device,
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
