"""Unpickling that runs no code of the file: tensors, arrays and a few named classes, no more.

Shards and checkpoints are handed around among strangers, and plain unpickling runs what they wrote.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch

_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
}

# By which a pickled tensor loads its storage. The second stands in pickles of processes that have
# imported Megatron-Core 0.17 or newer.
_STORAGES = {
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),
}


def loads(data: bytes, *, classes: Iterable[type] = ()) -> Any:
    """Object pickled in `data`: plain values, tensors, NumPy arrays, instances of `classes`.

    Raises:
        pickle.UnpicklingError: the pickle names anything else.
    """
    return _Unpickler(io.BytesIO(data), classes).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, classes: Iterable[type]):
        super().__init__(file)
        self._classes = {(cls.__module__, cls.__qualname__): cls for cls in classes}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STORAGES:
            return _load_storage
        if (module, name) in _TENSORS:
            return super().find_class(module, name)
        if (module, name) in self._classes:
            return self._classes[module, name]
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which is not allowed here")


def _load_storage(data: bytes) -> Any:
    """What torch does for a pickled tensor's storage, minus its `weights_only=False`."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
