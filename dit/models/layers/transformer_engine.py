"""Transformer Engine's linears and 8-bit products.

We use Transformer Engine's modules directly. Megatron-Core's wrappers of them store the amax
history of 8-bit products in checkpoints, which another implementation could not load. Only recipes
without a history are supported, so a run can resume exactly with either implementation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from dit.config import Fp8Recipe, Implementation, ModelConfig
from dit.models.layers.adaptable import Adaptable, TensorSharing, mark_split


def check_engine(model: ModelConfig) -> None:
    """Checks that Transformer Engine can run here, if `model.transformer_impl` selects it.

    Raises:
        ValueError: it is selected, but Transformer Engine or a GPU is missing.
    """
    asked = model.transformer_impl is Implementation.TRANSFORMER_ENGINE
    if asked and not (find_spec("transformer_engine") and torch.cuda.is_available()):
        raise ValueError(
            f"model.transformer_impl={model.transformer_impl} needs Transformer Engine and an"
            " NVIDIA GPU, and at least one of them is missing; install the extra `te` on a machine"
            " with a GPU, or set model.transformer_impl=local"
        )


def engine_linear(
    inputs: int,
    outputs: int,
    *,
    axis: int,
    bias: bool,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
) -> nn.Module:
    """Transformer Engine's linear; tensor ranks divide its weight [O, I] along `axis`."""
    linear = _linear_class()
    return linear(inputs, outputs, axis=axis, bias=bias, config=config, groups=groups)


@cache
def _linear_class() -> Any:
    from transformer_engine.pytorch import Linear  # type: ignore[import-not-found]

    class EngineLinear(Adaptable, Linear):
        def __init__(
            self,
            inputs: int,
            outputs: int,
            *,
            axis: int,
            bias: bool,
            config: TransformerConfig,
            groups: ProcessGroupCollection,
        ):
            super().__init__(
                inputs,
                outputs,
                bias=bias,
                params_dtype=config.params_dtype,
                parallel_mode=("column", "row")[axis],
                sequence_parallel=config.sequence_parallel,
                tp_group=groups.tp,
                tp_size=groups.tp.size(),
                init_method=nn.init.zeros_,  # `init.initialise` sets the values later
                device="cpu",
            )
            self.axis, self.group = axis, groups.tp
            mark_split(self.weight, axis=axis)
            if bias and axis == 0:
                mark_split(self.bias, axis=0)

        def forward(self, x: Tensor) -> Tensor:
            """The output [T, O] of this tensor rank for `x` [T, I], including adapters."""
            return self.adapted(x, super().forward)

        def tensor_sharing(self) -> TensorSharing:
            sequence = self.sequence_parallel
            shared = {"group": self.group, "sequence": sequence, "token_row": self.token_row}
            return TensorSharing(axis=self.axis, **shared)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            """The sharded weight, bias and adapters, with the names of our own linears."""
            axes = {"weight": self.axis} | ({"bias": 0} if self.axis == 0 else {})
            own = make_sharded_tensors_for_checkpoint(
                dict(self.named_parameters(recurse=False)),
                prefix,
                axes,
                sharded_offsets,
                tp_group=self.group,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            )
            return self.with_adapter(own, prefix, sharded_offsets, metadata)

    return EngineLinear


def fp8_products(model: ModelConfig) -> AbstractContextManager[Any]:
    """A context in which linears of `engine_linear` compute in FP8, if `model.fp8` is set."""
    if model.fp8 is None:
        return nullcontext()
    from transformer_engine.common import recipe  # type: ignore[import-not-found]
    from transformer_engine.pytorch import fp8_autocast  # type: ignore[import-not-found]

    recipes = {
        Fp8Recipe.TENSORWISE: "Float8CurrentScaling",
        Fp8Recipe.BLOCKWISE: "Float8BlockScaling",
        Fp8Recipe.MXFP8: "MXFP8BlockScaling",
    }
    form = recipe.Format[model.fp8.name]
    made = getattr(recipe, recipes[model.fp8_recipe])(fp8_format=form)
    return fp8_autocast(enabled=True, fp8_recipe=made)
