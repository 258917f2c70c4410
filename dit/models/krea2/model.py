"""Krea 2: fusion of the hidden states of each text token, then layers over latents and text."""
# T packed tokens, M timesteps, C patch features, D model width, L text tokens
# S hidden states of a text token, E width of a state, X = S * E numbers of a token, or S * L rows

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from dit.batch import PackedBatch
from dit.models.krea2.family import (
    EPS,
    THETA,
    VECTORS,
    Krea2Config,
    fusion_layers,
    krea2_stack,
)
from dit.models.layer_spec import (
    JOINT_TOKENS,
    LEVEL_WAVES,
    TEXT_TOKENS,
    TOKENS,
    LayerSpec,
)
from dit.models.layers.adaptable import (
    DropoutRows,
    dropout_rows,
    dropping,
    sees_part_of_tokens,
)
from dit.models.layers.modulation import (
    SharedModulations,
    TableAdaLN,
    TimestepConditioning,
    TwoLinears,
    sinusoid,
)
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import CentredNorm, RotaryTable
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.parts import JointConditions
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.models.stacks.step_layer import StepLayer

_GELU = partial(gelu, approximate="tanh")
_SHARED = sum(VECTORS.values())


class Krea2Network(JointTransformer):
    """Denoiser of Krea 2: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `Krea2Transformer2DModel`. The first pipeline stage fuses
    the hidden states of the text and computes 6 vectors that all modulations share. It sends them
    with the hidden states, together with the timestep embedding.
    """

    def __init__(
        self, model: Krea2Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, (krea2_stack(model),))
        self.rotary = RotaryTable(model.rope_axes, (THETA,) * 3, dtype=torch.float64)
        context = BuildContext(model=model, config=config, groups=groups)
        if self.pre_process:
            text: Any = {"widths": (width, width), "activation": _GELU}
            self.patches = Replicated(
                model.patch_features, width, config=config, bias=True, token_row=TOKENS
            )
            self.told = TwoLinears(LEVEL_WAVES, config, activation=_GELU)
            self.modulations = SharedModulations(
                context, width, VECTORS, bias=True, activation=_GELU
            )
            self.text_fusion = TextFusion(context)
            self.text_norm = _norm(model.text_width, context)
            self.text_embedder = TwoLinears(model.text_width, config, token_row=TEXT_TOKENS, **text)
        self.build_stacks()
        self.build_head(
            JOINT_TOKENS,
            modulate_out=lambda context: TableAdaLN(context.config, width, parts=1, gated=False),
        )
        if self.post_process:
            self.norm_out = _norm(width, context)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, (_SHARED + 1) * self.config.hidden_size)}

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        told_MD = self.told(sinusoid(level_M, LEVEL_WAVES).to(dtype))
        rows_MX = torch.cat((self.modulations(told_MD), told_MD), dim=-1)
        conditions = self.conditions({T_EMB: rows_MX}, batch, layout)
        apart = self._order(layout.text.row, device=x_TC.device).apart
        # Text has no rotary positions; also, its heads have another width.
        plain = replace(conditions.rows[TEXT_TOKENS], angles_TK=None)
        of_text = replace(conditions, rows={TEXT_TOKENS: plain}, meetings={(TEXT_TOKENS,): apart})
        text_LX = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        fused_LE = self.text_fusion(text_LX, of_text)
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.text_embedder(self.text_norm(fused_LE)),
            T_EMB: rows_MX,
        }

    def conditions(
        self, blocks: Blocks, batch: PackedBatch, layout: JointLayout
    ) -> JointConditions:
        shared_MX, told_MD = self._rows(blocks)
        timestep = TimestepConditioning(t_emb_ND=told_MD, adaln_shift_NX=shared_MX)
        return replace(super().conditions(blocks, batch, layout), timestep=timestep)

    def head(self, blocks: Blocks, batch: PackedBatch, layout: JointLayout) -> Tensor:  # noqa: ARG002
        _, told_MD = self._rows(blocks)
        head: Any = self.modulate_out
        (adaln,) = head.of_embedding(told_MD)
        normed_JD = self.norm_out(blocks[JOINT_TOKENS])
        return layout.order.latents(
            self.all_tokens(self.proj_out(adaln.scaled(normed_JD, layout.joint)))
        )

    def _rows(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """(modulation vectors [M, 6 D] that all layers share, timestep embedding [M, D])."""
        width = self.config.hidden_size
        shared_MX, told_MD = blocks[T_EMB].split((_SHARED * width, width), dim=-1)
        return shared_MX, told_MD


def _norm(width: int, context: BuildContext) -> CentredNorm:
    made = CentredNorm(width, eps=EPS, dtype=context.config.params_dtype)
    sees_part_of_tokens(made, context.config)
    return made


class TextFusion(MegatronModule):
    """Maps the concatenated hidden states of each text token, [L, X], to one vector each, [L, E].

    The states of a token attend to each other, a linear combines them to one vector, and the tokens
    of a caption attend to each other. The arithmetic is that of Diffusers' `Krea2TextFusion`.
    """

    def __init__(self, context: BuildContext):
        super().__init__(config=context.config)
        model: Any = context.model
        self.states, self.width = model.num_text_layers, model.text_width
        of_states, of_tokens = fusion_layers(model)

        # Attributes: Megatron-Core would store the split weights of a ModuleList as if they were
        # whole.
        def add(name: str, spec: LayerSpec, count: int) -> list[str]:
            names = [f"{name}_{number}" for number in range(count)]
            for number, one in enumerate(names, 1):
                # They are on the first stage, before the layers that virtual stages share.
                at: Any = {"layer_number": number, "pg_collection": context.groups, "vp_stage": 0}
                setattr(self, one, StepLayer(context.config, spec=spec, model=model, **at))
            return names

        self.layers_of_states = add("states", of_states, model.num_fusion_layers)
        self.projector = Replicated(self.states, 1, config=context.config, token_row=TEXT_TOKENS)
        self.layers_of_tokens = add("tokens", of_tokens, model.num_refiner_layers)

    def forward(self, text_LX: Tensor, conditions: JointConditions) -> Tensor:
        # A token's states are adjacent rows, however tokens are distributed over ranks.
        h_XE = text_LX.unflatten(-1, (self.states, self.width)).flatten(0, 1)
        for name in self.layers_of_states:
            h_XE = self._again(getattr(self, name), h_XE, conditions, rows=self.states)
        h_LES = h_XE.unflatten(0, (-1, self.states)).transpose(1, 2)
        with dropping(_of_states(self.width)):
            h_LE = self.projector(h_LES.flatten(0, 1)).view(-1, self.width)
        for name in self.layers_of_tokens:
            h_LE = self._again(getattr(self, name), h_LE, conditions, rows=1)
        return h_LE

    def _again(self, layer: nn.Module, h: Tensor, conditions: JointConditions, rows: int) -> Tensor:
        """The output of `layer` for `h`; in training it is recomputed in the backward pass.

        `rows` is the number of rows of each text token. Without recomputation, all these layers
        would keep about 4 MB for each text token; with it, each layer keeps 61 KB.
        """
        dropout = _of_states(rows)

        def run(h: Tensor) -> Tensor:
            with dropping(dropout):  # the backward pass runs outside the outer `dropping`
                return layer(h, conditions)

        return checkpoint(run, h, use_reentrant=False) if self.training else run(h)


def _of_states(count: int) -> DropoutRows | None:
    """The seed and positions for dropout on the inputs of adapters; None without such dropout.

    `count` is the number of rows of each text token.
    """
    rows = dropout_rows()
    return rows if rows is None or count == 1 else rows.of_states(TEXT_TOKENS, count)
