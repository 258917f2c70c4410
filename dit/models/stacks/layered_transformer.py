"""Networks in which each layer sees another hidden state of the text (HiDream-I1)."""

# T packed tokens, M level rows, C patch features, L text tokens, D model width, E width of a text
# B rows of the text of layers in a pack, X its hidden states side by side
# N samples, P width of pooled text

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import TEXT, PackedBatch
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS, LayerTextSpec, StackSpec
from dit.models.layers.layer_text import LayerText, LayerTextRows
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.layers.parallel_linear import (
    BuildContext,
    Replicated,
    WholeLinear,
    transformer_config,
)
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.layers.token_refiner import by_sample
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.parts import JointConditions
from dit.models.stacks.stacked_transformer import Blocks
from dit.models.stacks.views import RunningView


class LayeredTransformer(JointTransformer):
    """Denoiser: noisy tokens, timesteps, texts and pooled text of a pack -> velocity of each token.

    The text of a sample is T5's states, then the last projection of Llama's, then each layer's own
    projection. Latents that are not square are padded with tokens of zeros, whose values layers
    read, and whose keys are zero.
    """

    padding_has_keys = False
    theta: ClassVar[float] = 10_000.0
    """Base of the rotary frequencies."""
    states: ClassVar[str]
    """Name of the text input with all hidden states side by side."""
    pooled: ClassVar[str]
    """Name of the pooled text."""

    def __init__(
        self,
        model: Any,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
        stacks: Sequence[StackSpec],
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, stacks)
        # Angles in float64, as in Diffusers.
        axes = model.rope_axes
        self.rotary = RotaryTable(axes, (self.theta,) * len(axes), dtype=torch.float64)
        text: Any = stacks[0].layer.view
        self.last_columns = text.text.columns(text.text.states[-1])
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
        lengths = zip(*(_lengths(batch, name) for name in (TEXT, self.states)), strict=True)
        return [of_t5 + 2 * of_llama for of_t5, of_llama in lengths]

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        last_BE = batch.texts[self.states][:, self.last_columns]
        text_LD = self.text_embedder(batch.text_LE.to(dtype))
        last_BD = self.state_embedder(last_BE.to(dtype))
        starts = [batch.text_offsets[name] for name in (TEXT, self.states, self.states)]
        texts_LD = by_sample((text_LD, last_BD, last_BD), starts)
        pooled_NP = batch.vectors[self.pooled].to(dtype)
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.my_tokens(layout.text.of(texts_LD)),
            T_EMB: self.told(level_M, pooled_NP),
        }

    def conditions(
        self, blocks: Blocks, batch: PackedBatch, layout: JointLayout
    ) -> JointConditions:
        made = super().conditions(blocks, batch, layout)
        of_others, own = (_lengths(batch, name) for name in (TEXT, self.states))
        text = LayerTextRows.of(
            batch.texts[self.states],
            own,
            before=[a + b for a, b in zip(of_others, own, strict=True)],
            text=layout.text.row,
            order=layout.order,
            my_tokens=self.my_tokens,
        )
        return replace(made, layer_text=text)


class SeeingOwnText(RunningView):
    """A view with a layer's own text in place of the text, restored behind the layer."""

    def modules(self, context: BuildContext, width: int, layer: int) -> dict[str, nn.Module]:
        text: LayerTextSpec = self.view.text
        state = text.state(layer)
        assert state is not None, "the last layer sees the text as it is"
        context = replace(context, token_row=self.view.row)
        return {"layer_text": LayerText(context, text, state=state, width=width)}

    def seen(self, layer: Any, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        assert conditions.layer_text is not None
        return layer.layer_text(h_TD, conditions.layer_text)

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        assert conditions.layer_text is not None
        return conditions.layer_text.placed[self.view.row].replaced(made_TD, h_TD)


def _lengths(batch: PackedBatch, name: str) -> list[int]:
    """Number of rows of the text `name` in each sample."""
    return [stop - first for first, stop in pairwise(batch.text_offsets[name])]
