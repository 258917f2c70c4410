"""Linears with and without tensor parallelism, feed-forwards, and Megatron-Core's configuration."""
# T rows, M timesteps, I inputs, O outputs (of this tensor rank, if ranks divide them)
# D model width, F hidden width of a feed-forward, X = 2 F gates and ups

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from dit.config import Implementation, ModelConfig, Precision
from dit.models.layer_spec import TOKENS, Activation, FeedForwardSpec
from dit.models.layers.adaptable import (
    Adaptable,
    TensorSharing,
    mark_split,
    sees_part_of_tokens,
)
from dit.models.layers.transformer_engine import engine_linear


def transformer_config(model: ModelConfig) -> TransformerConfig:
    """Megatron-Core's configuration for layers, schedules and checkpoints, from `model`."""
    bf16, virtual = model.precision is Precision.BF16, model.virtual_stages
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        kv_channels=model.hidden_size // model.num_attention_heads,
        add_bias_linear=False,
        normalization="LayerNorm",
        layernorm_epsilon=1e-6,
        activation_func=nn.functional.gelu,
        # So Megatron-Core sums the gradients of norms named q_layernorm and k_layernorm over
        # tensor ranks, which is needed because each rank has only some heads.
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype(model),
        pipeline_dtype=dtype(model),
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        context_parallel_size=model.context_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        batch_p2p_comm=False,  # see `StageLink`
        # Packs differ in length. For this, Megatron-Core requires an MoE dispatcher, which we do
        # not use.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # the mean over the global batch, never a mean of means
        # `init.initialise` sets the values of all parameters later.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


class HasPrecision(Protocol):
    """A configuration with a precision."""

    @property
    def precision(self) -> Precision: ...


def dtype(model: HasPrecision) -> torch.dtype:
    """The dtype of weights and activations for the precision of `model`."""
    return torch.bfloat16 if model.precision is Precision.BF16 else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Arguments that the constructors of most modules need, besides the module's sizes."""

    model: ModelConfig  # read for precision, layout, recomputation and implementation, not sizes
    config: TransformerConfig
    groups: ProcessGroupCollection
    token_row: str = TOKENS
    """Name of the stream of tokens that is the input of split linears."""


class _ParallelLinear(Adaptable):
    """Base of our subclasses of Megatron-Core's column- and row-parallel linears."""

    AXIS: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        """The output [T, O] of the linear and its adapters for `x` [T, I].

        Megatron-Core's own linears return (output, bias) instead.
        """
        return self.adapted(x, self.product)

    def product(self, x: Tensor) -> Tensor:
        """The output [T, O] of the linear for `x` [T, I], without adapters.

        With sequence parallelism a column-parallel linear gathers its input from tensor ranks, and
        a row-parallel linear reduce-scatters its output over tensor ranks.
        """
        own: Any = self
        if own.tp_group.size() > 1 or own.gradient_accumulation_fusion:
            base: Any = super()
            return base.forward(x)[0]
        # This product adds the bias, while Megatron-Core reads and writes the output once more for
        # it. With several tensor ranks we use Megatron-Core: its autograd function overlaps the
        # backward pass with communication (tensor_parallel/layers.py:490 of 0.16.1), and adds the
        # bias inside. A forward pass of our own would depend on what that backward pass reads,
        # which differs between versions. Row linears add the bias after the sum (line 1296).
        return nn.functional.linear(x, own.weight, own.bias)

    def tensor_sharing(self) -> TensorSharing:
        own: Any = self
        return TensorSharing(
            axis=self.AXIS,
            group=own.tp_group,
            sequence=own.sequence_parallel,
            partial=getattr(own, "disable_grad_reduce", False),
            token_row=self.token_row,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        base: Any = super()
        own = base.sharded_state_dict(prefix, sharded_offsets, metadata)
        return self.with_adapter(own, prefix, sharded_offsets, metadata)


class ColumnLinear(_ParallelLinear, ColumnParallelLinear):  # type: ignore[override]
    """A linear whose outputs tensor ranks divide."""

    AXIS = 0

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        bias: bool = False,
        partial_gradient: bool = False,
    ):
        """Creates the weights; with `partial_gradient`, ranks do not sum the input's gradient."""
        super().__init__(
            inputs,
            outputs,
            config=config,
            init_method=nn.init.zeros_,
            bias=bias,
            gather_output=False,
            disable_grad_reduce=partial_gradient,
            tp_group=groups.tp,
        )
        assert self.weight is not None  # only None for weights that are passed to `forward`
        mark_split(self.weight, axis=0)  # Megatron-Core marks the bias


class RowLinear(_ParallelLinear, RowParallelLinear):  # type: ignore[override]
    """A linear whose inputs tensor ranks divide; outputs are summed over the ranks.

    The bias is added once, after the sum. Under sequence parallelism each rank adds the bias to its
    own tokens, so Megatron-Core sums the bias's gradient over ranks.
    """

    AXIS = 1

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        bias: bool = False,
    ):
        super().__init__(
            inputs,
            outputs,
            config=config,
            init_method=nn.init.zeros_,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        mark_split(self.weight, axis=1)


class GatheredLinear(ColumnLinear):
    """A column-parallel linear whose outputs are gathered on all tensor ranks.

    It serves for modulations: its input has a row for each timestep. Such linears have large
    matrices and few input rows: the per-block modulations of FLUX, Qwen-Image and HunyuanVideo are
    27 to 33 % of all parameters.

    With sequence parallelism each rank uses the outputs only for its own tokens, so its gradient of
    the outputs is partial, and the backward pass is a reduce-scatter. Otherwise each rank has the
    whole gradient and takes the columns of its own outputs.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        bias: bool = False,
    ):
        whole = copy(config)
        whole.sequence_parallel = False  # every rank has all rows of the input
        super().__init__(
            inputs,
            outputs,
            config=whole,
            groups=groups,
            bias=bias,
            partial_gradient=config.sequence_parallel,
        )
        self.shares_tokens = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """All outputs of all tensor ranks, for `x` [M, I] with a row per timestep."""
        part = super().forward(x)
        if self.shares_tokens:
            return all_gather_last_dim_from_tensor_parallel_region(part, group=self.tp_group)
        return gather_from_tensor_model_parallel_region(part, group=self.tp_group)


def split_linear(
    inputs: int,
    outputs: int,
    *,
    axis: int,
    context: BuildContext,
    bias: bool = False,
    parts: int = 1,
) -> nn.Module:
    """A linear whose outputs (`axis` 0) or inputs (`axis` 1) tensor ranks divide.

    It is a `ColumnLinear`, a `RowLinear`, or Transformer Engine's, depending on
    `model.transformer_impl`. `parts` is the number of the published network's linears that it fuses
    (`Adaptable.parts`).
    """
    shared: Any = {"bias": bias, "config": context.config, "groups": context.groups}
    if context.model.transformer_impl is Implementation.LOCAL:
        made: Any = (ColumnLinear, RowLinear)[axis](inputs, outputs, **shared)
    else:
        made = engine_linear(inputs, outputs, axis=axis, **shared)
    made.token_row, made.parts = context.token_row, parts
    return made


def add_gradients_in_products(model: nn.Module) -> None:
    """Turns on gradient accumulation fusion for the split linears of `model` that support it.

    Their backward pass then adds the weight's gradient directly to the buffers of Megatron-Core's
    DDP, which must wrap the model. Transformer Engine's linears always support it;
    Megatron-Core's linears need Apex, and stay unfused without it.

    Raises:
        ValueError: no linear of `model` supports it on this machine.
    """
    layers = list(model.modules())
    of_engine: list[Any] = [x for x in layers if hasattr(x, "fuse_wgrad_accumulation")]
    of_core = [x for x in layers if isinstance(x, ColumnParallelLinear | RowParallelLinear)]
    apex = check_fusion(of_engine=bool(of_engine))
    for layer in of_engine:
        layer.fuse_wgrad_accumulation = True
    for layer in of_core if apex else ():
        layer.gradient_accumulation_fusion = True


def check_fusion(*, of_engine: bool) -> bool:
    """Whether Apex is installed, with which Megatron-Core's linears fuse gradient accumulation.

    `of_engine` says whether some linears are Transformer Engine's, which do not need Apex.

    Raises:
        ValueError: Apex is missing, and no linears are Transformer Engine's.
    """
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    if not (apex or of_engine):
        raise ValueError(
            "model.gradient_accumulation_fusion=true needs Apex built with --cuda_ext (module"
            " fused_weight_gradient_mlp_cuda), which is not installed, or Transformer Engine's"
            " linears; set model.gradient_accumulation_fusion=false, or"
            " model.transformer_impl=transformer_engine"
        )
    return apex


class WholeLinear(Adaptable, nn.Linear):
    """A linear whose weight and input are whole on every tensor rank."""

    def forward(self, input: Tensor) -> Tensor:
        """The output [T, O] for `input` [T, I], including adapters."""
        return self.adapted(input, self.product)

    def product(self, x: Tensor) -> Tensor:
        """The output [T, O] for `x` [T, I], without adapters."""
        return nn.functional.linear(x, self.weight, self.bias)

    def tensor_sharing(self) -> TensorSharing:
        return TensorSharing(token_row=self.token_row)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        dp_cp = (metadata or {})["dp_cp_group"]
        own = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            {},
            sharded_offsets,
            dp_cp_group=dp_cp,
        )
        return self.with_adapter(own, prefix, sharded_offsets, metadata)


class Replicated(WholeLinear):
    """A linear whose weight is whole on every tensor rank.

    Under sequence parallelism, ranks divide the rows of the input, and gradients are summed.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        bias: bool = False,
        token_row: str | None = None,
    ):
        """Creates the weights.

        `token_row` is the name of the stream of tokens that is the input; None: the input has a row
        for each timestep.
        """
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)
        self.token_row = token_row
        sees_part_of_tokens(self, config)


def _gated(x_TX: Tensor, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The gated activation f(gate) · up (arXiv:2002.05202), [T, F].

    Gates and ups are alternating columns of `x_TX`, so that each tensor rank has whole pairs.
    """
    gate_TF, up_TF = x_TX.unflatten(-1, (-1, 2)).unbind(-1)
    return activation(gate_TF) * up_TF


ACTIVATIONS = {
    Activation.GELU: gelu,
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
    Activation.SILU: silu,
    Activation.SWIGLU: partial(_gated, activation=silu),
    Activation.GEGLU: partial(_gated, activation=gelu),
}


class FeedForward(MegatronModule):
    """The feed-forward of a layer: linear, activation, linear."""

    def __init__(self, context: BuildContext, spec: FeedForwardSpec):
        super().__init__(config=context.config)
        wide, bias = spec.hidden * spec.activation.inputs, spec.bias
        self.activation = ACTIVATIONS[spec.activation]
        self.linear_fc1 = split_linear(spec.width, wide, axis=0, context=context, bias=bias)
        self.linear_fc2 = split_linear(spec.hidden, spec.width, axis=1, context=context, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x_TD)))
