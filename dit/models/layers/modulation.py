"""Timestep conditioning: embeddings of the timestep, and published forms of adaLN."""

# N timesteps of a pack (`PackedBatch.num_levels`), T tokens of a stream on this rank,
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

_GUIDANCE_SCALE = 1000  # the guidance scale is multiplied by this before its sinusoid, like t


def sinusoid(level_N: Tensor, width: int, *, scale: float = 1) -> Tensor:
    """The sinusoidal embedding [N, width] of `level_N`: cosines, then sines, float32.

    Frequencies are 10000^(-i / half) for i = 0, ..., half - 1, with half = `width` / 2
    (arXiv:1706.03762, Sec. 3.5). `scale` multiplies the angles, as the last operation, because
    Qwen-Image rounds in this order.
    """
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=level_N.device)
    angle = level_N.float()[:, None] * torch.exp(-math.log(10_000.0) * index / half) * scale
    return pad(torch.cat((angle.cos(), angle.sin()), dim=-1), (0, width % 2))


class TimestepEmbedding(nn.Module):
    """Maps timesteps [N] to (timestep embedding [N, D], shared modulation [N, 3 D]) (Cosmos).

    The embedding is a normalised sinusoid; the modulation is an MLP of the sinusoid, to which each
    layer adds its own (`TimestepConditioning.adaln_shift_NX`).
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

    Guidance and pooled text are optional. If a network also gets the end of a step (mean flow), the
    first term is the mean of the embeddings of the timestep and of the step's end. The arithmetic
    is that of these classes of Diffusers:
        CombinedTimestepGuidanceTextProjEmbeddings  timestep, guidance, pooled text (FLUX)
        CombinedTimestepTextProjEmbeddings          timestep, pooled text (SD3)
        HunyuanImageCombinedTimeGuidanceEmbedding   timestep, end of a step, guidance
        Flux2TimestepGuidanceEmbeddings             timestep, guidance, without biases
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
        """Creates the embeddings.

        `pooled` is the width of the pooled text, or None without it. `guidance` and `step_end` say
        whether the guidance scale and the timestep at which a step ends are embedded.
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

        `pooled_XP` has a row per sample, which is added to all timesteps of the sample.
        `step_end_N` are the timesteps at which a step of mean flow ends. In networks with pooled
        text, guidance is not added to the timesteps of clean tokens, which follow those of samples
        (HunyuanVideo).
        """
        t_emb_ND = self.level(self._waves(level_N))
        if self.step_end is not None:
            assert step_end_N is not None, "a mean-flow network needs the end of the step"
            t_emb_ND = (t_emb_ND + self.step_end(self._waves(step_end_N))) / 2
        if self.guidance is not None:
            assert guidance is not None, "the network needs a guidance scale"
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
    """An MLP of two linears with an activation between them, for tokens or timestep embeddings."""

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
        """Creates the linears.

        `widths` are the numbers of outputs of the first and of the second linear; None: the model's
        width for both. `token_row` is the name of the stream of tokens that is the input; None: the
        input has a row for each timestep.
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
    """The embedded timesteps from which each layer computes its modulation."""

    # Timestep embedding, including pooled text and guidance. In families whose modulations are
    # computed before the layers, it is the concatenation of all modulation vectors instead.
    t_emb_ND: Tensor
    adaln_shift_NX: Tensor | None = None
    """Modulation [N, X] that all layers share, to which low-rank and table modulations add their
    own; None in families with other modulations."""
    of_rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Modulations [M, X] that all layers share, like `adaln_shift_NX`, for streams of tokens with
    separate timesteps, by the name of the stream."""


@dataclass(frozen=True, slots=True)
class AdaLN:
    """Shift, scale and gate of one sublayer, for each timestep of a pack.

    x = norm(h) * (1 + scale) + shift             `branch`
    y = sublayer(x)                               attention, cross-attention or MLP
    h = h + gate * y                              `add`; `add_and_branch` also computes the next x
    Source: adaLN-Zero of arXiv:2212.09748, Sec. 3.2.
    """

    shift_ND: Tensor | None  # None: no shift
    scale_ND: Tensor  # the factor is 1 + scale
    gate_ND: Tensor | None  # None: the sublayer's output has no gate

    def modulate(self, h_TD: Tensor, per_sample: PerSample) -> Tensor:
        """The sublayer's input [T, D]: norm(`h_TD`) * (1 + scale) + shift.

        The norm has no weights. It is RMSNorm if `per_sample.rms` is set, else LayerNorm.
        """
        return per_sample.modulate(h_TD, **self._scale_and_shift)

    def branch(self, h_TD: Tensor, per_sample: PerSample) -> tuple[Tensor, Tensor]:
        """(`h_TD` for the residual sum, input of the sublayer), both [T, D].

        Layers must use the returned tokens, not `h_TD`, in the residual sum; `PerSample.branch`
        explains why.
        """
        return per_sample.branch(h_TD, **self._scale_and_shift)

    def scaled(self, x_TD: Tensor, per_sample: PerSample) -> Tensor:
        """`x_TD` * (1 + scale) + shift, for tokens that a norm with weights has normalised."""
        y_TD = per_sample.add(x_TD, x_TD, gate_ND=self.scale_ND)  # x + x * scale
        if self.shift_ND is None:
            return y_TD
        return y_TD + look_up(self.shift_ND, per_sample.level_row_T).type_as(y_TD)

    def add(self, h_TD: Tensor, x_TD: Tensor, per_sample: PerSample) -> Tensor:
        """`h_TD` + gate * `x_TD`, with `x_TD` the output of the sublayer."""
        assert self.gate_ND is not None
        return per_sample.add(h_TD, x_TD, gate_ND=self.gate_ND)

    def add_and_branch(
        self, h_TD: Tensor, x_TD: Tensor, per_sample: PerSample, *, then: AdaLN
    ) -> tuple[Tensor, Tensor]:
        """`add`, then `branch` of the next sublayer, whose modulation is `then`.

        Returns the results of `branch`. One kernel computes both if `per_sample.fused` is set.
        """
        assert self.gate_ND is not None
        rows = {"gate_ND": self.gate_ND, **then._scale_and_shift}
        return per_sample.add_and_branch(h_TD, x_TD, **rows)

    @property
    def _scale_and_shift(self) -> dict[str, Tensor]:
        shift_ND = torch.zeros_like(self.scale_ND) if self.shift_ND is None else self.shift_ND
        return {"scale_ND": 1 + self.scale_ND, "shift_ND": shift_ND}


class AdaLNModule(MegatronModule):
    """Base of modules that compute the `AdaLN` of each of `parts` sublayers.

    It is a `MegatronModule`, because Megatron-Core's checkpoints would store the split weight of a
    `torch.nn.Module` as if it were replicated.
    """

    def __init__(
        self, config: TransformerConfig, *, parts: int, gated: bool = True, shifted: bool = True
    ):
        super().__init__(config=config)
        self.parts, self.gated, self.shifted = parts, gated, shifted
        self.each = 1 + gated + shifted

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        """The vectors of all sublayers, concatenated: [N, parts * each * D].

        The vectors of a sublayer are shift (if `shifted`), scale, and gate (if `gated`).
        """
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
    """Modulation by a linear of the timestep embedding (FLUX); tensor ranks divide its outputs."""

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
    """Modulation by the sum of a shared modulation and a learned table (Wan, LTX).

    The shared modulation is `TimestepConditioning.adaln_shift_NX`. The sum is float32.
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
        """The modulation of each sublayer: each vector of the table plus `t_emb_ND`."""
        rows_NX = t_emb_ND.repeat(1, self.parts * self.each)
        return self(TimestepConditioning(t_emb_ND=t_emb_ND, adaln_shift_NX=rows_NX))


class PrecomputedAdaLN(AdaLNModule):
    """Modulation without weights, by vectors that were computed before the layers.

    Chroma and FLUX.2 have it. `TimestepConditioning.t_emb_ND` holds the vectors.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        first: int,
        parts: int = 1,
        gated: bool = True,
        shifted: bool = True,
    ):
        """Sets the range of vectors; `first` is the index of this module's first vector."""
        super().__init__(config, parts=parts, gated=gated, shifted=shifted)
        self.first = first

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        width = self.config.hidden_size
        return timestep.t_emb_ND.narrow(1, self.first * width, self.parts * self.each * width)


class SharedModulations(MegatronModule):
    """Computes modulations that layers share from the timestep embedding [N, D].

    Each modulation is a linear of the activated embedding (SiLU by default). The result is the
    concatenation of all modulations, [N, number of vectors * D]; layers read their vectors by
    `PrecomputedAdaLN`. Source: FLUX.2, `Flux2Modulation` of Diffusers.
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
        """Creates the linears.

        `vectors` maps the name of each linear to its number of vectors (scales, shifts and gates).
        `plain` are the names of linears whose input is the embedding without activation.
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
    """The module that `spec` describes, for `parts` sublayers of layer `layer` of a stack."""
    if isinstance(spec, FamilyModulation):
        return resolve_name(spec.runs)(context, width, spec)
    shared, config = {"parts": parts, "gated": gated}, context.config
    if isinstance(spec, PerBlockModulation):
        return PerBlockAdaLN(context, width, spec, **shared, shifted=shifted)
    if isinstance(spec, SharedModulation):
        first = spec.first + layer * spec.each
        return PrecomputedAdaLN(config, first=first, **shared, shifted=shifted)
    assert shifted, f"{spec} always has shifts"
    return TableAdaLN(config, width, **shared)
