"""FLUX.3 klein: separate layers for text, picture and references, then joint layers."""

# T packed tokens, C patch features, D model width, M timesteps, N samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn.functional import pad

from dit.batch import PackedBatch, StepEnd
from dit.models.flux3.family import (
    ALL_VECTORS,
    EARLY,
    HEAD,
    SINGLE,
    AttendBesideFeed,
    Flux3Config,
    flux3_stacks,
)
from dit.models.layer_spec import LEVEL_WAVES, TOKENS
from dit.models.layers.modulation import PrecomputedAdaLN, SharedModulations, TwoLinears, sinusoid
from dit.models.layers.packed_attention import SelfAttention
from dit.models.layers.parallel_linear import BuildContext, FeedForward, Replicated
from dit.models.positions import TimeOffsetPositions
from dit.models.stacks.double_single_transformer import DoubleSingleTransformer
from dit.models.stacks.joint_transformer import T_EMB
from dit.models.stacks.parts import LayerConditions, RunningPart
from dit.models.stacks.stacked_transformer import Shapes

KINDS = ("image", "reference", "text")
"""Kinds of tokens. `t_emb` has N rows for the first kind, then N for the second, then the third."""
_EACH = {"early": EARLY, "single": SINGLE}


class Flux3Network(DoubleSingleTransformer):
    """Denoiser of FLUX.3 klein: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `Flux3Transformer2DModel`. A sample has three timestep
    embeddings: of its noise level for its picture, and of level 0 for references and for text.
    Picture, references and text have separate linears for modulations. The first pipeline stage
    computes all modulations and sends them with the hidden states. With `flow_map` all three
    embeddings also depend on the timestep at the end of a step; in training, which has no steps,
    this is the sample's own timestep.
    """

    refines_references = references_meet = True
    has_biases = False
    text_level = KINDS.index("text")

    def __init__(
        self, model: Flux3Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        super().__init__(
            model,
            groups,
            vp_stage,
            flux3_stacks(model),
            told=lambda config: TwoLinears(LEVEL_WAVES, config, bias=False),
            modulate_out=lambda context: PrecomputedAdaLN(
                context.config, first=EARLY + SINGLE, gated=False
            ),
        )
        if self.pre_process:
            config, width = self.config, model.hidden_size
            self.reference_patches = Replicated(
                model.patch_features, width, config=config, token_row=TOKENS
            )
            self.step_end = TwoLinears(LEVEL_WAVES, config, bias=False) if model.flow_map else None
            context = BuildContext(model=model, config=config, groups=groups)
            self.image_modulations = SharedModulations(context, width, _EACH | {"out": HEAD})
            self.reference_modulations = SharedModulations(context, width, _EACH)
            self.text_modulations = SharedModulations(context, width, _EACH)

    def parameters_without_gradient(self) -> list[str]:
        of_references = ["reference_blocks.*", "reference_patches.*", "reference_modulations.*"]
        none = [] if self.model.reference_latents else of_references
        return [*super().parameters_without_gradient(), *none]

    def embedded_patches(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:
        is_reference_T = self.my_tokens(batch.is_real_T & ~batch.is_target_T)[:, None]
        return torch.where(is_reference_T, self.reference_patches(x_TC), self.patches(x_TC))

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:
        samples, dtype = batch.num_samples, self.config.params_dtype
        level_N = level_M[:samples]
        both_2N = torch.cat((level_N, torch.zeros_like(level_N)))
        told_2ND = self.told(sinusoid(both_2N, LEVEL_WAVES).to(dtype))
        if self.step_end is not None:
            end = batch.method(StepEnd)
            end_N = level_N if end is None else end.level_N
            told_2ND = told_2ND + self.step_end(sinusoid(end_N, LEVEL_WAVES).to(dtype)).repeat(2, 1)
        noisy_ND, clean_ND = told_2ND.split(samples)
        rows = (
            self.image_modulations(noisy_ND),
            self.reference_modulations(clean_ND),
            self.text_modulations(clean_ND),
        )
        width = ALL_VECTORS * self.config.hidden_size
        # Zeros for the head's vectors of text and references, whose outputs are not used.
        return torch.cat([pad(row, (0, width - row.shape[1])) for row in rows])

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        rows = len(KINDS) * batch.num_samples
        return {T_EMB: (rows, ALL_VECTORS * self.config.hidden_size)}

    def text_positions(self, batch: PackedBatch) -> Tensor:
        rows_LA = TimeOffsetPositions.of_text(self.text_lengths(batch))
        return rows_LA.to(batch.position_TA.device)


class AttendingBesideFeeding(RunningPart):
    """Runs attention and feed-forward on the same tokens and returns the sum of their outputs."""

    part: AttendBesideFeed

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        context = replace(context, token_row=self.part.port.row)
        return {
            "attention": SelfAttention(context, self.part.attention),
            "mlp": FeedForward(context, self.part.feed_forward),
        }

    def outputs(
        self, layer: Any, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor]:
        (x_TD,), name = inputs, self.part.port.row
        row, exchange = conditions.rows[name], conditions.meetings[(name,)]
        return (layer.attention(x_TD, row, exchange) + layer.mlp(x_TD),)
