"""Timestep conditioning: embeddings of the timestep, and published forms of adaLN."""

# N level rows of a pack (`PackedBatch.num_levels`), T tokens of a row as this rank holds them,
# D model width, R rank of a modulation, P width of pooled text, X any width

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from dit.models.layer_spec import (
    LEVEL_WAVES,
    FamilyModulation,
    ModulationSpec,
    PerBlockModulation,
    SharedModulation,
)
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.parallel_linear import BuildContext, GatheredLinear, Replicated
from dit.models.layers.per_sample import PerSample, look_up

_GUIDANCE_SCALE = 1000  # before its sinusoid, as of t


def sinusoid(level_N: Tensor, width: int, *, scale: float = 1) -> Tensor:
    """Cosines, then sines of `level_N` at `width` / 2 frequencies, [N, width], float32.

    `scale` multiplies the angles last, as in Qwen-Image; earlier, rounding would differ. Source:
    arXiv:1706.03762, Sec. 3.5, with frequencies 10000^(-i / half).
    """
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=level_N.device)
    angle = level_N.float()[:, None] * torch.exp(-math.log(10_000.0) * index / half) * scale
    return pad(torch.cat((angle.cos(), angle.sin()), dim=-1), (0, width % 2))


class TimestepEmbedding(nn.Module):
    """Embedding of timesteps [N]: a normalised sinusoid [N, D], and an MLP's vectors [N, 3 D].

    The vectors are the modulation that all layers share (`TimestepConditioning.adaln_shift_NX`).
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        width = config.hidden_size
        self.linear_1 = Replicated(width, width, config=config)
        self.linear_2 = Replicated(width, 3 * width, config=config)
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=config.params_dtype)
        sees_part_of_tokens(self.norm, config)

    def forward(self, level_N: Tensor) -> tuple[Tensor, Tensor]:
        wave_ND = sinusoid(level_N, self.linear_1.in_features).type_as(self.linear_1.weight)
        return self.norm(wave_ND), self.linear_2(silu(self.linear_1(wave_ND)))


class ConditionEmbedding(nn.Module):
    """Sum [N, D] of the embeddings of timestep, guidance scale and pooled text.

    With the end of a step (mean flow), the first term is the mean of its embedding and the
    timestep's. The arithmetic is that of Diffusers' `CombinedTimestepGuidanceTextProjEmbeddings`
    (FLUX); without guidance of `CombinedTimestepTextProjEmbeddings` (SD3); without pooled text of
    `HunyuanImageCombinedTimeGuidanceEmbedding`, which also embeds the end of a step; without biases
    of `Flux2TimestepGuidanceEmbeddings`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pooled: int | None = None,
        guidance: bool = False,
        step_end: bool = False,
        bias: bool = True,
    ):
        """`pooled` is the width of the pooled text; None: there is none.

        `step_end` adds the embedding of the timestep at which a step ends (mean flow).
        """
        super().__init__()
        make = partial(TwoLinears, config=config, bias=bias)
        self.level = make(LEVEL_WAVES)
        self.step_end = make(LEVEL_WAVES) if step_end else None
        self.guidance = make(LEVEL_WAVES) if guidance else None
        self.pooled = None if pooled is None else make(pooled)
        self.dtype = config.params_dtype

    def forward(
        self,
        level_N: Tensor,
        pooled_XP: Tensor | None = None,
        guidance: float | None = None,
        *,
        step_end_N: Tensor | None = None,
    ) -> Tensor:
        """The embedding [N, D] of the timesteps `level_N`.

        `pooled_XP` has a row per sample, which is added to all noise levels of the sample.
        `step_end_N` are the timesteps at which a step of mean flow ends. With pooled text, levels
        of clean tokens, which follow those of the samples, get no guidance (HunyuanVideo).
        """
        t_emb_ND = self.level(self._waves(level_N))
        if self.step_end is not None:
            assert step_end_N is not None, "networks of mean flow are told where a step ends"
            t_emb_ND = (t_emb_ND + self.step_end(self._waves(step_end_N))) / 2
        if self.guidance is not None:
            assert guidance is not None, "the network is told a guidance scale"
            told_1 = torch.full_like(level_N[:1], _GUIDANCE_SCALE * guidance)
            samples = len(level_N) if pooled_XP is None else len(pooled_XP)
            guided_ND = self.guidance(self._waves(told_1)).expand(samples, -1)
            t_emb_ND = t_emb_ND + pad(guided_ND, (0, 0, 0, len(level_N) - samples))
        if self.pooled is None:
            return t_emb_ND
        assert pooled_XP is not None
        return t_emb_ND + self.pooled(pooled_XP).repeat(len(level_N) // len(pooled_XP), 1)

    def _waves(self, level_N: Tensor) -> Tensor:
        return sinusoid(level_N, LEVEL_WAVES).to(self.dtype)


class TwoLinears(nn.Module):
    """Linear, activation, linear, for tokens or for rows of the table of noise levels."""

    def __init__(
        self,
        inputs: int,
        config: TransformerConfig,
        *,
        bias: bool = True,
        widths: tuple[int, int] | None = None,
        activation: Callable[[Tensor], Tensor] = silu,
        token_row: str | None = None,
    ):
        """`widths` are the outputs of the first and of the second linear; None: the model's width.

        `token_row` names the row of tokens that is the input; None: the input has a row for each
        noise level.
        """
        super().__init__()
        inside, width = widths or (config.hidden_size,) * 2
        self.activation = activation
        options: Any = {"config": config, "bias": bias, "token_row": token_row}
        self.linear_1 = Replicated(inputs, inside, **options)
        self.linear_2 = Replicated(inside, width, **options)

    def forward(self, x_NX: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(x_NX)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimestepConditioning:
    """The embedded timestep from which each layer computes its modulation."""

    # Timestep embedding, with what a family adds to it (pooled text, guidance); where modulations
    # are made before the layers, those of all layers or stacks side by side
    t_emb_ND: Tensor
    adaln_shift_NX: Tensor | None = None
    """Modulation [N, X] that all layers share, to which low-rank and table modulations add their
    own; None in families with other modulations."""
    of_rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Modulations [M, X] like `adaln_shift_NX` for rows of tokens with separate noise levels, by
    the row's name."""


@dataclass(frozen=True, slots=True)
class AdaLN:
    """Shift, scale and gate of one sublayer, from the noise level of each sample.

    x = norm(h) * (1 + scale) + shift             `branch`
    y = sublayer(x)                               attention, cross-attention or MLP
    h = h + gate * y                              `add`; `add_and_branch` also computes the next x

    Source: adaLN-Zero of arXiv:2212.09748, Sec. 3.2.
    """

    shift_ND: Tensor | None  # None: nothing is added
    scale_ND: Tensor  # 1 is added to it
    gate_ND: Tensor | None  # of the part's output; None where it has none

    def modulate(self, h_TD: Tensor, per_sample: PerSample) -> Tensor:
        """The norm of the tokens `h_TD` without weights, scaled and shifted: the sublayer's input.

        It is RMSNorm with `per_sample.rms`, else LayerNorm.
        """
        return per_sample.modulate(h_TD, **self._scale_and_shift)

    def branch(self, h_TD: Tensor, per_sample: PerSample) -> tuple[Tensor, Tensor]:
        """(tokens for the residual sum, input of the sublayer), both [T, D], from tokens `h_TD`.

        Layers must continue with the returned tokens instead of `h_TD`; `PerSample.branch` explains
        why.
        """
        return per_sample.branch(h_TD, **self._scale_and_shift)

    def scaled(self, x_TD: Tensor, per_sample: PerSample) -> Tensor:
        """`x_TD` * (1 + scale) + shift, for tokens already normalised by a norm with weights."""
        y_TD = per_sample.add(x_TD, x_TD, gate_ND=self.scale_ND)  # x + x * scale
        if self.shift_ND is None:
            return y_TD
        return y_TD + look_up(self.shift_ND, per_sample.level_row_T).type_as(y_TD)

    def add(self, h_TD: Tensor, x_TD: Tensor, per_sample: PerSample) -> Tensor:
        """`h_TD` plus the gated output `x_TD` of the sublayer."""
        assert self.gate_ND is not None
        return per_sample.add(h_TD, x_TD, gate_ND=self.gate_ND)

    def add_and_branch(
        self, h_TD: Tensor, x_TD: Tensor, per_sample: PerSample, *, then: AdaLN
    ) -> tuple[Tensor, Tensor]:
        """`add`, then `branch` by the next sublayer's modulation `then`, with `branch`'s results.

        One kernel computes both if `per_sample.fused`.
        """
        assert self.gate_ND is not None
        rows = {"gate_ND": self.gate_ND, **then._scale_and_shift}
        return per_sample.add_and_branch(h_TD, x_TD, **rows)

    @property
    def _scale_and_shift(self) -> dict[str, Tensor]:
        shift_ND = torch.zeros_like(self.scale_ND) if self.shift_ND is None else self.shift_ND
        return {"scale_ND": 1 + self.scale_ND, "shift_ND": shift_ND}


class AdaLNModule(MegatronModule):
    """Computes the `AdaLN` of each of `parts` sublayers from the embedded timestep.

    It is a module of Megatron-Core, because a checkpoint would store the split weight of one of
    torch's as replicated.
    """

    def __init__(
        self, config: TransformerConfig, *, parts: int, gated: bool = True, shifted: bool = True
    ):
        super().__init__(config=config)
        self.parts, self.gated, self.shifted = parts, gated, shifted
        self.each = 1 + gated + shifted

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        """Shift, scale and gate of all sublayers side by side, [N, parts * each * D]."""
        raise NotImplementedError

    def forward(self, timestep: TimestepConditioning) -> tuple[AdaLN, ...]:
        rows = iter(self.rows(timestep).chunk(self.parts * self.each, dim=-1))
        return tuple(
            AdaLN(
                shift_ND=next(rows) if self.shifted else None,
                scale_ND=next(rows),
                gate_ND=next(rows) if self.gated else None,
            )
            for _ in range(self.parts)
        )


class PerBlockAdaLN(AdaLNModule):
    """Modulation by a linear of the timestep embedding, split over tensor ranks (FLUX)."""

    def __init__(
        self,
        context: BuildContext,
        width: int,
        spec: PerBlockModulation,
        *,
        parts: int,
        gated: bool = True,
        shifted: bool = True,
    ):
        super().__init__(context.config, parts=parts, gated=gated, shifted=shifted)
        self.activated = spec.activated
        self.linear = GatheredLinear(
            spec.inputs or width,
            self.parts * self.each * width,
            config=context.config,
            groups=context.groups,
            bias=True,
        )

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        t_emb_NX = timestep.t_emb_ND
        return self.linear(silu(t_emb_NX) if self.activated else t_emb_NX)


class TableAdaLN(AdaLNModule):
    """Modulation by the sum of rows that all layers share and a learned table (Wan, LTX).

    It is computed in float32.
    """

    def __init__(self, config: TransformerConfig, width: int, *, parts: int, gated: bool = True):
        super().__init__(config, parts=parts, gated=gated)
        rows = torch.zeros(self.parts * self.each, width, dtype=config.params_dtype)
        self.table = nn.Parameter(rows)
        sees_part_of_tokens(self, config)

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        assert timestep.adaln_shift_NX is not None
        return timestep.adaln_shift_NX.float() + self.table.float().flatten()

    def of_embedding(self, t_emb_ND: Tensor) -> tuple[AdaLN, ...]:
        """The modulation of each sublayer: its vectors of the table, with `t_emb_ND` added."""
        rows_NX = t_emb_ND.repeat(1, self.parts * self.each)
        return self(TimestepConditioning(t_emb_ND=t_emb_ND, adaln_shift_NX=rows_NX))


class PrecomputedAdaLN(AdaLNModule):
    """Modulation by vectors that were computed before the layers (Chroma, FLUX.2); no weights."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        first: int,
        parts: int = 1,
        gated: bool = True,
        shifted: bool = True,
    ):
        """`first` is the number of vectors, each of the model's width, before this module's."""
        super().__init__(config, parts=parts, gated=gated, shifted=shifted)
        self.first = first

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        width = self.config.hidden_size
        return timestep.t_emb_ND.narrow(1, self.first * width, self.parts * self.each * width)


class SharedModulations(MegatronModule):
    """Modulations that all layers of a stack share: vectors [N, R D] from the embedding [N, D].

    Each modulation is one linear of the activated embedding (SiLU by default). The layers read its
    vectors by `PrecomputedAdaLN`, so its gradient is a sum over layers. Source: FLUX.2,
    `Flux2Modulation` of Diffusers.
    """

    def __init__(
        self,
        context: BuildContext,
        width: int,
        vectors: Mapping[str, int],
        *,
        bias: bool = False,
        plain: Collection[str] = (),
        activation: Callable[[Tensor], Tensor] = silu,
    ):
        """`vectors` maps each linear's name to the number of scales, shifts and gates it computes.

        `plain` are the names of linears that read the embedding without activation.
        """
        super().__init__(config=context.config)
        self.plain, self.activation = plain, activation
        options: Any = {"config": context.config, "groups": context.groups, "bias": bias}
        for name, count in vectors.items():
            self.add_module(name, GatheredLinear(width, count * width, **options))

    def forward(self, t_emb_ND: Tensor) -> Tensor:
        activated_ND = self.activation(t_emb_ND)
        rows = [
            linear(t_emb_ND if name in self.plain else activated_ND)
            for name, linear in self.named_children()
        ]
        return torch.cat(rows, dim=-1)


def make_modulation(
    spec: ModulationSpec,
    context: BuildContext,
    width: int,
    *,
    parts: int,
    gated: bool = True,
    shifted: bool = True,
    layer: int = 0,
) -> AdaLNModule:
    """The module that `spec` describes, for the `parts` sublayers of the layer `layer`, from 0."""
    if isinstance(spec, FamilyModulation):
        return resolve_name(spec.runs)(context, width, spec)
    shared, config = {"parts": parts, "gated": gated}, context.config
    if isinstance(spec, PerBlockModulation):
        return PerBlockAdaLN(context, width, spec, **shared, shifted=shifted)
    if isinstance(spec, SharedModulation):
        first = spec.first + layer * spec.each
        return PrecomputedAdaLN(config, first=first, **shared, shifted=shifted)
    assert shifted, f"{spec} makes shifts"
    return TableAdaLN(config, width, **shared)
