"""Adam's moments in fewer bits than float32, by Transformer Engine's FusedAdam.

Main parameters stay in float32 in Megatron-Core, where EMA and checkpoints find them. bfloat16
rounds each number separately; float16 and 8 bits have a scale for each rank's shard of a weight, so
their rounding depends on the layout. Checkpoints hold float32 in any case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from dit.config import MomentType, OptimizerConfig
from dit.config.training import MOMENTS
from dit.distributed.data_parallel import chained_optimizers, main_param_shards_of
from dit.train.optimizer import foreach
from dit.train.optimizer.states import state_prefix

_TORCH = {
    MomentType.FP32: torch.float32,
    MomentType.BF16: torch.bfloat16,
    MomentType.FP16: torch.float16,
    MomentType.FP8: torch.uint8,  # what Transformer Engine calls them
}


def check_moments(config: OptimizerConfig) -> None:
    """Raises ValueError if `config` asks for narrow moments that this machine cannot store."""
    if config.narrow_moments and not (
        find_spec("transformer_engine") and torch.cuda.is_available()
    ):
        raise ValueError(
            f"optimizer.exp_avg_dtype={config.exp_avg_dtype} and"
            f" optimizer.exp_avg_sq_dtype={config.exp_avg_sq_dtype} need Transformer Engine and a"
            " GPU, which are not both here; install the extra `te`, or leave the two keys out, so"
            " that moments are kept in fp32"
        )


def moment_options(config: OptimizerConfig) -> dict[str, Any]:
    """Arguments of Megatron-Core's `OptimizerConfig` for moments in fewer bits; {} for float32."""
    if not config.narrow_moments:
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": _TORCH[config.exp_avg_dtype],
        "exp_avg_sq_dtype": _TORCH[config.exp_avg_sq_dtype],
        # With this recipe Megatron-Core keeps the float32 main parameters itself; otherwise they
        # would be a state of FusedAdam like the moments. It changes nothing else, because weights
        # are not in 8 bits.
        "fp8_recipe": "tensorwise",
    }


def first_moments(inner: Any) -> None:
    """Sets all moments of `inner` to zero, so that a checkpoint can precede any update."""
    if not inner.config.use_precision_aware_optimizer:
        inner.init_state_fn(inner.optimizer, inner.config)
        return
    for group in inner.optimizer.param_groups:
        for p in group["params"]:
            # Megatron-Core 0.16.1 leaves out the second argument, which FusedAdam demands.
            inner.optimizer.initialize_state(p, store_param_remainders=False)


def put_moments(optimizer: MegatronOptimizer, values: Mapping[str, Sequence[Tensor]]) -> None:
    """Stores the float32 moments of a checkpoint in an optimizer that keeps fewer bits.

    `values` are the states by prefix, as from `optimizer_values`. With float32 moments they are the
    optimizer's own tensors, and nothing is done.
    """
    at = 0
    for inner in chained_optimizers(optimizer):
        params = [shard.value for shard in main_param_shards_of(inner)]
        if inner.config.use_precision_aware_optimizer:
            for name in MOMENTS:
                own = values[state_prefix(name)][at : at + len(params)]
                for p, moment in zip(params, own, strict=True):
                    # 8-bit moments are divided by their largest number; zeros are already stored.
                    if moment.any():
                        inner.optimizer.set_scaled_state(p, name, moment)
        at += len(params)


@torch.no_grad()
def only_decay_unmoved(inner: Any) -> None:
    """Updates weights with zero gradient and zero moments by weight decay only.

    Their gradients become None, so that FusedAdam skips them. FusedAdam divides 8-bit moments by
    their largest number, and would turn such weights into NaN. An example is matrix A of a new
    adapter: its first gradient is zero, because B is zero.
    """
    for group in inner.optimizer.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            continue
        largest = foreach.norms([p.grad for p in params], order=math.inf)
        for p, moved in zip(params, largest.tolist(), strict=True):
            moments = (inner.optimizer.get_unscaled_state(p, name) for name in MOMENTS)
            if moved == 0 and not any(moment.any() for moment in moments):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.grad = None
