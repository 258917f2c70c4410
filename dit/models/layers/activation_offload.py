"""Activations that wait in the host's memory until the backward pass asks for them."""

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
    """Inside, what autograd keeps of a layer goes to pinned memory of the host.

    But for its weights and the tensors of `shared`, which stay on the device in any case. Copies
    are in the order of the stream: the host waits for none of them.
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
