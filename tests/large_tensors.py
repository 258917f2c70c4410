"""Counts what large tensors of a process are alive at one time."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Large(TorchDispatchMode):
    """Counts numbers in weights and states that are alive at one time, whole ones and parts.

    What has fewer than `LEAST` is left out: all activations of these passes, and small weights.
    """

    LEAST = 3000

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}
        self.left_out: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, large = func(*args, **(kwargs or {})), False
        for one in tree_leaves((result, (kwargs or {}).get("out"))):
            if isinstance(one, torch.Tensor) and one.device.type != "meta":
                one = one.to_local() if isinstance(one, DTensor) else one
                if one.untyped_storage().nbytes() >= 4 * self.LEAST:
                    self.see(one)
                    large = True
        if large:
            self.most = max(self.most, self.alive())
        return result

    def see(self, tensor: torch.Tensor) -> None:
        ref = StorageWeakRef(tensor.untyped_storage())
        self.seen.setdefault(ref.cdata, ref)

    def leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor in host memory, which a CPU cannot tell by its device."""
        self.left_out.add(StorageWeakRef(tensor.untyped_storage()).cdata)
        return tensor

    def alive(self) -> int:
        total = 0
        for key, ref in [*self.seen.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self.seen[key]
                self.left_out.discard(key)
            elif key not in self.left_out and storage.nbytes() >= 4 * self.LEAST:
                total += storage.nbytes() // 4
        return total
