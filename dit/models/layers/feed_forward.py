"""The feed-forward of a layer: two linears with an activation between them."""

# T tokens, D model width, F width inside

from __future__ import annotations

from functools import partial

from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import gelu, silu

from dit.models.layer_spec import Activation, FeedForwardSpec
from dit.models.layers.parallel_linear import BuildContext, split_linear


def _swiglu(x_TX: Tensor) -> Tensor:
    """silu(gate) · up (arXiv:2002.05202); the two alternate, so that any split keeps them paired.

    Were all gates before all ups, a tensor rank's part of the matrix would hold either.
    """
    gate_TF, up_TF = x_TX.unflatten(-1, (-1, 2)).unbind(-1)
    return silu(gate_TF) * up_TF


ACTIVATIONS = {
    Activation.GELU: gelu,
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
    Activation.SILU: silu,
    Activation.SWIGLU: _swiglu,
}


class FeedForward(MegatronModule):
    """Linear, activation, linear."""

    def __init__(self, context: BuildContext, spec: FeedForwardSpec):
        super().__init__(config=context.config)
        wide, bias = spec.hidden * spec.activation.inputs, spec.bias
        self.activation = ACTIVATIONS[spec.activation]
        self.linear_fc1 = split_linear(spec.width, wide, axis=0, context=context, bias=bias)
        self.linear_fc2 = split_linear(spec.hidden, spec.width, axis=1, context=context, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x_TD)))
