"""Operations on all weights at once: a few GPU kernels, instead of some for each weight.

On a CPU torch itself loops.
"""

# W weights

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch  # its types do not name these operations
_PIECE = 4096


def lerp(averages: Sequence[Tensor], values: Sequence[Tensor], rate: float) -> None:
    """Moves each average towards its value by the fraction `rate`."""
    if averages:
        _torch._foreach_lerp_([*averages], [*values], rate)


def subtract(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtracts, in place, each of `others` from the tensor with the same index in `tensors`."""
    if tensors:
        _torch._foreach_sub_([*tensors], [*others])


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        _torch._foreach_copy_([*targets], [*sources])


def norms(tensors: Sequence[Tensor], *, order: float = 2) -> Tensor:
    """Norms [W] of one or more tensors, Euclidean by default, without waiting for the device."""
    if order != 2 or tensors[0].is_cuda:
        return torch.stack(_torch._foreach_norm([*tensors], order))
    return torch.stack([_euclidean(tensor) for tensor in tensors])


def _euclidean(tensor: Tensor) -> Tensor:
    """The Euclidean norm of `tensor`, from the norms of its pieces.

    On a CPU torch adds all float32 squares one after another: the norm of 40 million numbers is
    0.3% too small, by an amount that depends on how ranks divide them.
    """
    flat = tensor.flatten()
    whole = flat[: flat.numel() // _PIECE * _PIECE].view(-1, _PIECE)
    norms = [
        torch.linalg.vector_norm(x, dim=-1) for x in (whole, flat[whole.numel() :].view(1, -1))
    ]
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64).to(tensor.dtype)


def install_norm_and_scale() -> None:
    """Makes Megatron-Core clip gradients by `norms` and `copy`, unless it has fused functions.

    Its own fallback waits for the norm of each gradient from the device, one by one.
    """
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(_chunk: int, _flag: Any, lists: Sequence[list[Tensor]], _each: bool) -> Any:
    """The norm [1] over all tensors of the first list; the arguments are as in Apex's function."""
    return norms([norms(lists[0])]), None


def _scale(_chunk: int, _flag: Any, lists: Sequence[list[Tensor]], factor: float) -> None:
    """Writes each tensor of the first list, times `factor`, into the second list's tensor."""
    sources, targets = lists
    if sources is not targets:
        copy(targets, sources)
    if targets:  # a rank may have no part of any trained weight
        _torch._foreach_mul_(targets, factor)
