"""How much a pickle may make, and of what."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

NUMPY_TYPES = {
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    *("f2", "f4", "f8", "c8", "c16"),
}
MOST_AXES = 32
_MOST_VALUES = 500_000
_MOST_DEPTH = 100
_MOST_KEYS = 10_000
_MOST_PARTS = 100
_SLACK = 1 << 20  # bytes
_EXPANDED = 64 << 20  # bytes
_MESSAGE = 250  # characters
_SCALARS = {type(None), bool, int, float, complex, str, bytes}
_LEAVES = _SCALARS - {str} | {bytearray, torch.Tensor, torch.dtype}


class Limits:
    """What one file may still make, counted down while it is read."""

    def __init__(self, size: int):
        # An array in an archive is there as text, as bytes, and twice as an array.
        self._bytes = 8 * size + _SLACK
        self._keys = _MOST_KEYS
        self._expanded = size + _EXPANDED

    def spend(self, size: int) -> None:
        """Before so many bytes are copied, or allocated because the file says so."""
        self._bytes -= size
        if size < 0 or self._bytes < 0:
            raise pickle.UnpicklingError("the pickle asks for far more memory than it has bytes")

    def check_size(self, size: int) -> None:
        """A tensor may repeat its numbers, and must be copied by whoever works with it."""
        if size > self._expanded:
            raise pickle.UnpicklingError(f"the pickle describes a tensor of {size} bytes")

    def check_key(self, key: Any) -> None:
        """A key's hash must not take long, and equal hashes of many keys do."""
        if type(key) is str:
            return
        self._keys -= 1
        if self._keys < 0:
            raise pickle.UnpicklingError(f"the pickle has over {_MOST_KEYS} keys that are no text")
        inner = key if type(key) is tuple else (key,)
        for item in inner:
            if type(item) not in _SCALARS or (type(item) is int and abs(item) > 2**64):
                raise pickle.UnpicklingError(f"the pickle has a key of {kind_of(item)}")
        if len(inner) > _MOST_PARTS:
            raise pickle.UnpicklingError(f"the pickle has a key of {len(inner)} parts")


def check_plain(value: Any, classes: frozenset[type]) -> None:
    """Whether whoever walks, prints or stores the value is safe.

    A container that holds itself has no end, and one that holds the same one twice, again and
    again, has none that is worth waiting for.

    Raises:
        pickle.UnpicklingError: it is no plain value, too large or nested too deeply.
    """
    left, count = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        count += 1
        inner = _inside(item, classes)
        if depth > _MOST_DEPTH or count + len(left) + len(inner) > _MOST_VALUES:
            raise pickle.UnpicklingError("the pickle holds itself, or is too large or too deep")
        left += [(one, depth + 1) for one in inner]


def _inside(item: Any, classes: frozenset[type]) -> list[Any] | tuple[Any, ...]:
    kind = type(item)
    if kind in _LEAVES or kind in classes:
        return ()
    if kind is str:
        item.encode()  # half of a surrogate pair cannot be written anywhere
        return ()
    if kind is dict:
        return [*item, *item.values()]
    if kind in (list, tuple, set, frozenset):
        return list(item)
    if kind is np.ndarray or isinstance(item, np.generic):
        if item.dtype.str[1:] in NUMPY_TYPES:
            return ()
        raise pickle.UnpicklingError(f"the pickle holds NumPy values of {item.dtype}")
    raise pickle.UnpicklingError(f"the pickle holds {kind_of(item)}, which is not allowed here")


def kind_of(item: Any) -> str:
    """What a value is called in a message; names that a pickle may hold say it themselves."""
    return getattr(item, "text", None) or f"a {type(item).__name__}"


def short(what: object) -> str:
    """A message on one line, whatever a file has put into it."""
    text = str(what)[: 2 * _MESSAGE]
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MESSAGE else f"{text[:_MESSAGE]}..."
