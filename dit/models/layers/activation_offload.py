"""Activations that are kept in host memory between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_SMALL = 1 << 16
"""Bytes below which a copy costs more than it frees."""
Kept = Tensor | tuple[torch.device, tuple[int, ...], Tensor]


@contextmanager
def on_host(layer: nn.Module, shared: Any) -> Iterator[None]:
    """Inside, tensors that autograd saves for the backward pass go to pinned host memory.

    The weights of `layer` and the tensors of `shared` stay on the device, which holds them anyway.
    Copies are queued on the current stream, so that the host waits for none of them.
    """
    staying = {_storage(t) for t in (*layer.parameters(), *_tensors(shared))}

    def pack(kept: Tensor) -> Kept:
        if kept.nbytes < _SMALL or _storage(kept) in staying:
            return kept
        home = torch.empty_like(kept, device="cpu", pin_memory=kept.is_cuda)
        return kept.device, kept.stride(), home.copy_(kept, non_blocking=True)

    def unpack(kept: Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, stride, home = kept
        # Compiled kernels insist on the strides that they have seen.
        back = torch.empty_strided(home.shape, stride, dtype=home.dtype, device=device)
        return back.copy_(home, non_blocking=True)

    with saved_tensors_hooks(pack, unpack):
        yield


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(of: Any) -> Iterator[Tensor]:
    """The tensors of a dataclass, and of those in it."""
    if isinstance(of, Tensor):
        yield of
    elif is_dataclass(of):
        for field in fields(of):
            yield from _tensors(getattr(of, field.name))
