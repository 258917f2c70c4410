"""HiDream-I1: double-stream layers, then sequential ones; each has its own Llama hidden state."""
# T packed tokens, M timesteps, C patch features, L text tokens, D model width, E width of a text
# B rows of layer text in a pack, N samples, P width of pooled text

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import TEXT, PackedBatch
from dit.models.family import POOLED
from dit.models.hidream.family import (
    FAMILY,
    LAYER_TEXT,
    STATES,
    HiDreamConfig,
    OwnText,
    hidream_stacks,
)
from dit.models.hidream.layer_text import LayerTextRows
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.layers.parallel_linear import Replicated, WholeLinear, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.layers.token_refiner import by_sample
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.parts import JointConditions
from dit.models.stacks.stacked_transformer import Blocks

THETA = 10_000.0
"""Base of the rotary frequencies."""


class HiDreamNetwork(JointTransformer):
    """Denoiser of HiDream-I1: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `HiDreamImageTransformer2DModel` in training mode. The text
    of a sample has three parts: T5's states, the projection of Llama's last state, and a projection
    of Llama that differs from layer to layer. Latents that are not square are padded with tokens of
    zeros; layers attend to these tokens, with keys of zeros and their own values.
    """

    padding_has_keys, sign = False, FAMILY.objective.sign

    def __init__(
        self, model: HiDreamConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width, stacks = transformer_config(model), model.hidden_size, hidream_stacks(model)
        super().__init__(config, model, groups, vp_stage, stacks)
        # Angles in float64, as in Diffusers.
        axes = model.rope_axes
        self.rotary = RotaryTable(axes, (THETA,) * len(axes), dtype=torch.float64)
        text = stacks[0].layer.view
        assert isinstance(text, OwnText)
        self.last_columns = text.columns(text.states[-1])
        if self.pre_process:
            of_tokens: Any = {"config": config, "bias": True, "token_row": TOKENS}
            whole: Any = {"bias": False, "dtype": config.params_dtype}
            self.patches = Replicated(model.patch_features, width, **of_tokens)
            self.text_embedder = WholeLinear(model.crossattn_emb_size, width, **whole)
            self.state_embedder = WholeLinear(model.llama_size, width, **whole)
            self.told = ConditionEmbedding(config, pooled=model.pooled_size)
        self.build_stacks()
        self.build_head(JOINT_TOKENS)

    def text_lengths(self, batch: PackedBatch) -> list[int]:
        lengths = zip(*(_lengths(batch, name) for name in (TEXT, STATES)), strict=True)
        return [of_t5 + 2 * of_llama for of_t5, of_llama in lengths]

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        last_BE = batch.texts[STATES][:, self.last_columns]
        text_LD = self.text_embedder(batch.text_LE.to(dtype))
        last_BD = self.state_embedder(last_BE.to(dtype))
        starts = [batch.text_offsets[name] for name in (TEXT, STATES, STATES)]
        texts_LD = by_sample((text_LD, last_BD, last_BD), starts)
        pooled_NP = batch.vectors[POOLED].to(dtype)
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.my_tokens(layout.text.of(texts_LD)),
            T_EMB: self.told(level_M, pooled_NP),
        }

    def conditions(
        self, blocks: Blocks, batch: PackedBatch, layout: JointLayout
    ) -> JointConditions:
        made = super().conditions(blocks, batch, layout)
        of_t5, own = (_lengths(batch, name) for name in (TEXT, STATES))
        text = LayerTextRows.of(
            batch.texts[STATES],
            own,
            before=[a + b for a, b in zip(of_t5, own, strict=True)],
            text=layout.text.row,
            order=layout.order,
            my_tokens=self.my_tokens,
        )
        return replace(made, of_parts={LAYER_TEXT: text})


def _lengths(batch: PackedBatch, name: str) -> list[int]:
    return [stop - first for first, stop in pairwise(batch.text_offsets[name])]
