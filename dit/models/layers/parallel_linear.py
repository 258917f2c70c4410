"""The choice of linear layer, feed-forwards, and the configuration for Megatron-Core."""

# T rows, M level rows, I inputs, O outputs (both of this tensor rank where they are split)
# D model width, F width inside a feed-forward, X = 2 F gates and ups

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
        # Megatron then sums the gradients of norms named q_layernorm and k_layernorm over tensor
        # ranks: each rank sees its own heads only.
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
        batch_p2p_comm=False,  # `StageLink` says why
        # Packs differ in length; Megatron ties this to an MoE dispatcher that is never used here.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # the mean over the global batch, never a mean of means
        # `init.initialise` gives every parameter its value afterwards.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


class HasPrecision(Protocol):
    """A configuration that has the precision of a network or of a part of one."""

    @property
    def precision(self) -> Precision: ...


def dtype(model: HasPrecision) -> torch.dtype:
    """Type of weights and activations for the precision of `model`."""
    return torch.bfloat16 if model.precision is Precision.BF16 else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Arguments with which every module of a network is built, besides the module's sizes."""

    model: ModelConfig  # precision, layout, recomputation and implementation; never a width
    config: TransformerConfig
    groups: ProcessGroupCollection
    token_row: str = TOKENS
    """Name of the row of tokens that split linears process."""


class _ParallelLinear(Adaptable):
    """Code that our versions of Megatron-Core's column and row linears share."""

    AXIS: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        """The output [T, O] of the linear and its adapters for `x` [T, I].

        Megatron-Core's linears return (output, bias) instead.
        """
        return self.adapted(x, self.product)

    def product(self, x: Tensor) -> Tensor:
        """Output [T, O] of the linear for `x` [T, I], without adapters.

        With sequence parallelism a column linear gathers its input from all tensor ranks, and a row
        linear scatters its sum over tensor ranks.
        """
        own: Any = self
        if own.tp_group.size() > 1 or own.gradient_accumulation_fusion:
            base: Any = super()
            return base.forward(x)[0]
        # The product adds the bias, for which Megatron-Core reads and writes the output once more.
        # On several tensor ranks it still does: `output + bias` stands inside the autograd function
        # whose backward pass computes while gradients travel (tensor_parallel/layers.py:490 of
        # 0.16.1), and another forward pass would copy all that the backward reads of it, which
        # differs between versions; for row linears it comes after the sum over ranks (line 1296).
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
    """Linear whose outputs are split over tensor ranks."""

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
        """With `partial_gradient`, tensor ranks do not sum their parts of the input's gradient."""
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
        assert self.weight is not None  # none where a shared one is handed to each call
        mark_split(self.weight, axis=0)  # Megatron-Core marks the bias itself


class RowLinear(_ParallelLinear, RowParallelLinear):  # type: ignore[override]
    """Linear whose inputs are split over tensor ranks; the outputs are summed over them.

    The bias is added once, after the sum. Under sequence parallelism each rank adds the bias to its
    own tokens, so Megatron-Core marks the bias and sums its gradient over ranks.
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

    Its input has a row for each noise level. Such linears have large matrices and few input rows:
    the per-block modulations of FLUX, Qwen-Image and HunyuanVideo hold 27 to 33 % of all
    parameters.

    With sequence parallelism each rank reads the outputs only for its own tokens, so its gradient
    of the outputs is partial: the backward pass is a reduce-scatter. Without sequence parallelism
    each rank takes its own outputs' columns of the whole gradient.
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
        whole.sequence_parallel = False  # the level rows are whole on every rank
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
        """The outputs [M, O], complete on all tensor ranks; `x` [M, I] has a row per level."""
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
    """A linear that tensor ranks split by outputs (`axis` 0) or by inputs (`axis` 1).

    It is a `ColumnLinear`, a `RowLinear`, or Transformer Engine's. `parts` is the number of the
    published network's linears that it fuses (`Adaptable.parts`).
    """
    shared: Any = {"bias": bias, "config": context.config, "groups": context.groups}
    if context.model.transformer_impl is Implementation.LOCAL:
        made: Any = (ColumnLinear, RowLinear)[axis](inputs, outputs, **shared)
    else:
        made = engine_linear(inputs, outputs, axis=axis, **shared)
    made.token_row, made.parts = context.token_row, parts
    return made


def add_gradients_in_products(model: nn.Module) -> None:
    """Turns on gradient accumulation fusion, if possible, for all split linears of `model`.

    Their backward pass then adds the weight's gradient directly to the buffers of Megatron-Core's
    DDP, which must wrap the model. Transformer Engine's linears need no library for it.
    Megatron-Core's need Apex; without Apex theirs stay unfused.

    Raises:
        ValueError: no layer of `model` can do so on this machine.
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
    """Whether Apex is installed, for gradient accumulation fusion in Megatron-Core's linears.

    `of_engine` says that some linears are Transformer Engine's, which do not need it.

    Raises:
        ValueError: neither Apex nor linears of Transformer Engine are there.
    """
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    if not (apex or of_engine):
        raise ValueError(
            "model.gradient_accumulation_fusion=true needs Apex, built with --cuda_ext, or"
            " Transformer Engine, and Apex's fused_weight_gradient_mlp_cuda is not installed here;"
            " set it to false, or model.transformer_impl=transformer_engine"
        )
    return apex


class WholeLinear(Adaptable, nn.Linear):
    """A linear whose weight every tensor rank holds whole."""

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
    """A replicated linear; under sequence parallelism each tensor rank processes its own rows."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        bias: bool = False,
        token_row: str | None = None,
    ):
        """`token_row` names the row of tokens that is the input; None: a row per noise level."""
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)
        self.token_row = token_row
        sees_part_of_tokens(self, config)


def _gated(x_TX: Tensor, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The gated activation f(gate) · up (arXiv:2002.05202); gates and ups alternate in `x_TX`.

    Because columns alternate, each tensor rank has whole pairs.
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
