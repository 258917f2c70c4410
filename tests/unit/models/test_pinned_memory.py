"""Rows of page-locked memory: how long they are, and when they are used again."""

from __future__ import annotations

import mmap

import pytest
import torch

from dit.models.stacks.offload import PinnedRows, lock_pages, row_bytes


class Locked:
    """Stands in for the driver."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def __call__(self, address: int, size: int) -> None:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        assert all(address + size <= one or one + its <= address for one, its in self.rows.items())
        self.rows[address] = size


def test_a_row_is_at_most_a_sixteenth_too_long() -> None:
    for size in (1, 4096, 65_537, 75_497_472, 341_000_001, 3 << 30, (1 << 30) + 1):
        assert size <= row_bytes(size) <= max(size * 17 // 16, size + mmap.PAGESIZE)
        assert row_bytes(row_bytes(size)) == row_bytes(size)
    # A layer's activations at 75.5 MB took 128 MiB, a block of 0.7 GB took 1 GiB.
    assert row_bytes(75_497_472) == 75_497_472 and row_bytes(700_000_000) < 0.71e9


def test_a_row_is_used_again_once_nothing_sees_it() -> None:
    locked = Locked()
    rows = PinnedRows(locked)
    first = rows.empty((300, 70), torch.bfloat16)
    assert first.shape == (300, 70) and first.dtype is torch.bfloat16 and first.is_contiguous()
    address, view = first.data_ptr(), first.fill_(3)[7:9].detach()
    del first
    second = rows.empty((300, 70), torch.bfloat16)
    assert second.data_ptr() != address and bool((view == 3).all())
    del view
    third = rows.empty((20_900,), torch.uint16)  # about as long
    assert third.data_ptr() == address and third.numel() == 20_900
    assert rows.bytes == sum(locked.rows.values()) == 2 * row_bytes(42_000)
    assert rows.empty((0, 5), torch.float32).shape == (0, 5)


def test_memory_that_the_driver_does_not_lock_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        cudaHostRegister = staticmethod(lambda address, size, flags: 2)
        cudaGetErrorString = staticmethod(lambda error: "out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    rows = PinnedRows(lock_pages)
    with pytest.raises(RuntimeError, match=r"lock 1\.00 GiB of host memory \(out of memory\)"):
        rows.empty((1 << 28,), torch.float32)
    assert rows.bytes == 0
