"""Values that a cache may hold, and pickles that run code where they are trusted."""

from __future__ import annotations

import gc
import io
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

VALUES: dict[Any, Any] = {
    **{
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
            *(torch.bool, torch.complex64),
        )
    },
    "no numbers": torch.empty(0, 3),
    "no axes": torch.tensor(3.5),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.ones(1, 1).expand(3, 5),
    "part": torch.arange(100.0).reshape(10, 10)[2:4, 3:5],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "C": np.arange(12, dtype=np.float32).reshape(3, 4),
    "Fortran": np.asfortranarray(np.arange(12, dtype=np.float16).reshape(3, 4)),
    "axes moved": np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    "every second": np.arange(10)[::2],
    "array without axes": np.array(2.5),
    "array without numbers": np.zeros((0, 3)),
    "array of bool": np.array([True, False]),
    "big-endian": np.arange(3, dtype=">f4"),
    "scalars": [np.float32(3), np.int64(-3), np.bool_(True), np.float16(2), np.complex128(1j)],
    "plain": [1, -1, 2**70, True, None, 1.5, float("inf"), "é中\n", 1 + 2j],
    "bytes": [b"\x00\xff", b"", bytearray(b"xy"), bytearray()],
    "containers": [[], {}, (), (1,), (1, 2, 3, 4), {1, 2}, frozenset([3]), OrderedDict(a=[1])],
    "shape": torch.ones(2, 3).shape,
    "type": torch.bfloat16,
    7: "a key that is no text",
    (1, "a"): 3,
}


def assert_same(found: Any, given: Any, name: Any = "") -> None:
    """Equal in value and type, as far as one may differ: classes of containers become plain."""
    if isinstance(given, torch.Tensor):
        assert type(found) is torch.Tensor, name
        assert found.dtype == given.dtype and found.shape == given.shape, name
        wide = torch.complex128 if given.is_complex() else torch.float64  # float8 compares nothing
        assert torch.equal(found.to(wide), given.detach().to(wide)), name
    elif isinstance(given, np.ndarray | np.generic):
        assert type(found) is type(given) and found.dtype == given.dtype.newbyteorder("="), name
        assert np.array_equal(found, given), name
    elif isinstance(given, dict):
        assert type(found) is dict and list(found) == list(given), name
        for key, value in given.items():
            assert_same(found[key], value, (name, key))
    elif isinstance(given, list | tuple):
        assert len(found) == len(given) and isinstance(given, type(found)), name
        for index, value in enumerate(given):
            assert_same(found[index], value, (name, index))
    else:
        assert type(found) is type(given) and found == given, name


def saved(value: Any, **options: Any) -> bytes:
    """What `torch.save` writes."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


class Bomb:
    """Calls `function(*arguments)` when it is unpickled."""

    def __init__(self, function: Any = os.system, *arguments: Any):
        self.function = function
        self.arguments = arguments or ("echo boom",)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def opcodes(*parts: bytes | str) -> bytes:
    """A pickle put together by hand; text stands for SHORT_BINUNICODE of it."""
    words = [
        part
        if isinstance(part, bytes)
        else pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode()
        for part in parts
    ]
    return pickle.PROTO + b"\x04" + b"".join(words) + pickle.STOP


class _Watch:
    """What Python reports of itself: imports, calls of the system, opened files, look-ups."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        self.thread = 0  # those of other tests go on meanwhile

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Hypothesis traces some examples, and looks into their frames.
        if self.seen is None or self.thread != threading.get_ident():
            return
        if event != "object.__getattr__":
            self.seen.append(f"{event} {arguments}"[:200])


_WATCH = _Watch()


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Fails where anything is imported, opened, started, compiled or looked up meanwhile."""
    if not any(hook is _WATCH for hook in _HOOKS):
        _HOOKS.append(_WATCH)
        sys.addaudithook(_WATCH)
    _WATCH.seen, _WATCH.thread = [], threading.get_ident()
    gc.disable()  # what other tests have left may close files as it goes
    try:
        yield
        assert not _WATCH.seen, _WATCH.seen
    finally:
        gc.enable()
        _WATCH.seen = None


_HOOKS: list[_Watch] = []
