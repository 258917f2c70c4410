"""Page-locked host memory, from and to which a GPU copies beside its work.

torch's own (`pin_memory=True`) rounds each tensor up to a power of two, up to twice what is asked
for (at::CachingHostAllocatorImpl::allocate, torch 2.11 to 2.13). Its option against that,
`pinned_max_round_threshold_mb`, there hands out blocks that are too small for what is written to
them (pytorch/pytorch#192722). So rows that stay are locked here.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PARTS = 16
"""A row is rounded up to so many parts of the next power of two below, at most 1/16 too long."""


def lock_pages(address: int, size: int) -> None:
    """Lets GPUs read and write `size` bytes from `address` on.

    Raises:
        RuntimeError: the driver cannot lock so much memory.
    """
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, size, 0)
    if int(error):
        raise RuntimeError(
            f"the driver cannot lock {size / 2**30:.2f} GiB of host memory"
            f" ({runtime.cudaGetErrorString(error)}); give the machine or container more memory, or"
            " keep less on the host"
        )


class PinnedRows:
    """Tensors in page-locked memory, which the next ones of about the same size take over.

    A row is free as soon as its tensor and all views of it are gone: who drops a tensor with a copy
    under way orders the next use of the row behind it. Rows are never given back to the system.
    """

    def __init__(self, lock: Callable[[int, int], None] = lock_pages):
        self._lock = lock
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self.bytes = 0
        """Of all rows, free ones included."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of any values.

        Raises:
            RuntimeError: the driver cannot lock so much memory.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        size = row_bytes(count * dtype.itemsize)
        free = self._free[size]
        row = free.pop() if free else self._new(size)
        held = (ctypes.c_char * size).from_buffer(row)
        weakref.finalize(held, free.append, row).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=count).view(tuple(shape))

    def _new(self, size: int) -> mmap.mmap:
        row = mmap.mmap(-1, size)
        self._lock(ctypes.addressof(ctypes.c_char.from_buffer(row)), size)
        self.bytes += size
        return row


def row_bytes(size: int) -> int:
    """Bytes of a row for `size` bytes: whole pages, and few sizes, so that rows are used again."""
    part = max(mmap.PAGESIZE, 2 ** (size.bit_length() - 1) // _PARTS)
    return -(-size // part) * part
