"""The names that a pickle may hold, and the values that ours makes of each.

None of them is the function of that name: those trust their arguments, and some of them import,
allocate or call whatever they are told.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dit.safe_pickle.limits import MOST_AXES, NUMPY_TYPES, Limits


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """What stands for a function or class while a pickle is read; nothing can be set on it."""

    text: str
    make: Callable[..., Any]
    """(limits, arguments of the pickle) -> value."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes that tensors are views of."""

    dtype: torch.dtype
    content: Tensor  # uint8 [bytes]

    @classmethod
    def of(cls, dtype: torch.dtype, content: bytearray) -> Storage:
        """Without a copy."""
        if not content:  # which torch.frombuffer does not take
            return cls(dtype, torch.empty(0, dtype=torch.uint8))
        return cls(dtype, torch.frombuffer(content, dtype=torch.uint8))


@dataclass(slots=True, eq=False)
class NumpyType:
    """A NumPy dtype, whose byte order a pickle says afterwards."""

    kind: str
    order: str = "<"

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("the pickle has a NumPy dtype of no known form")
        self.order = state[1]

    def array(self, content: Any) -> np.ndarray:
        """One axis of numbers, in the order of this machine; they may be a view of `content`."""
        given = np.frombuffer(content, np.dtype(self.order + self.kind))
        return given.astype(given.dtype.newbyteorder("="), copy=False)


def fill_array(limits: Limits, array: np.ndarray, state: Any) -> None:
    """What `ndarray.__setstate__` does for an array that `_reconstruct` has made."""
    _version, shape, dtype, fortran, content = state
    if array.shape != (0,) or array.dtype != np.int8:
        raise pickle.UnpicklingError("the pickle fills an array twice")
    _check_array(shape, dtype, content)
    limits.spend(2 * len(content))
    values = dtype.array(content)
    state = (1, shape, values.dtype, bool(fortran), values.tobytes())
    array.__setstate__(state)  # pyright: ignore[reportArgumentType] - takes Python's bool alone


def _check_array(shape: Any, dtype: Any, content: Any) -> None:
    _check_numbers(shape)
    if type(dtype) is not NumpyType or type(content) not in (bytes, bytearray):
        raise pickle.UnpicklingError("the pickle has an array of no known form")
    size = math.prod(shape) * np.dtype(dtype.kind).itemsize
    if size != len(content):
        raise pickle.UnpicklingError(
            f"the pickle has an array of shape {list(shape)} and {len(content)} bytes"
        )


def _check_numbers(numbers: Any) -> None:
    """A shape, strides or the order of axes."""
    if type(numbers) is not tuple or len(numbers) > MOST_AXES:
        raise pickle.UnpicklingError("the pickle has a shape of no known form")
    if not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
        raise pickle.UnpicklingError("the pickle has a shape of no known form")


def _array_to_fill(_: Limits, kind: Name, _shape: Any, _dtype: Any) -> np.ndarray:
    if kind is not NAMES["numpy", "ndarray"]:
        raise pickle.UnpicklingError("the pickle has an array of another class")
    return np.empty(0, np.int8)


def _array_of_buffer(
    limits: Limits, content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None
) -> np.ndarray:
    _check_array(shape, dtype, content)
    limits.spend(2 * len(content))
    flat = dtype.array(content).copy()
    if order == "K" and axes is not None:
        _check_numbers(axes)
        return flat.reshape(shape, order="C").transpose(axes)
    return flat.reshape(shape, order=order)


def _numpy_scalar(_: Limits, dtype: Any, content: Any) -> np.generic:
    _check_array((), dtype, content)
    return dtype.array(content)[0]


def _numpy_type(_: Limits, kind: Any, *_flags: Any) -> NumpyType:
    name = kind.lstrip("<|=")
    if name not in NUMPY_TYPES:
        raise pickle.UnpicklingError(f"the pickle names the NumPy type {kind}, which is no number")
    return NumpyType(name)


def _tensor(
    limits: Limits, storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype
) -> Tensor:
    """A view of its storage, as `torch.Tensor.set_` makes it."""
    _check_numbers(size)
    _check_numbers(stride)
    _check_numbers((offset,))
    if len(size) != len(stride):
        raise pickle.UnpicklingError("the pickle has a tensor of no known form")
    # An axis of length 0 must not hide what the others multiply to.
    limits.check_size(math.prod(max(1, n) for n in size) * dtype.itemsize)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    numbers = storage.content.view(dtype)
    if math.prod(size) and last >= len(numbers):
        raise pickle.UnpicklingError(
            f"the pickle has a tensor of shape {list(size)} and {len(numbers)} numbers"
        )
    if not math.prod(size):
        return torch.empty(size, dtype=dtype)
    return numbers.as_strided(size, stride, offset)


def _tensor_v2(
    limits: Limits, storage: Any, offset: Any, size: Any, stride: Any, *more: Any
) -> Any:
    if len(more) > 2 and more[2]:
        raise pickle.UnpicklingError("the pickle has a tensor that is conjugate or negated")
    return _tensor(limits, storage, offset, size, stride, storage.dtype)


def _tensor_v3(
    limits: Limits, storage: Any, offset: Any, size: Any, stride: Any, *more: Any
) -> Any:
    _grad, _hooks, dtype, *metadata = more
    if any(metadata):
        raise pickle.UnpicklingError("the pickle has a tensor that is conjugate or negated")
    return _tensor(limits, storage, offset, size, stride, dtype)


def _parameter(_: Limits, data: Any, *_flags: Any) -> Tensor:
    if type(data) is not Tensor:
        raise pickle.UnpicklingError("the pickle has a parameter of no known form")
    return data


def _encoded(limits: Limits, text: Any, encoding: Any) -> bytes:
    """How protocols 0 to 2 write bytes."""
    if encoding not in ("latin1", "latin-1") or type(text) is not str:
        raise pickle.UnpicklingError("the pickle has bytes of no known form")
    limits.spend(len(text))
    return text.encode("latin1")


def _bytes(limits: Limits, content: Any = b"") -> bytes:
    return bytes(_byte_array(limits, content))


def _byte_array(limits: Limits, content: Any = b"") -> bytearray:
    if type(content) is not bytes:  # a number is the length that it asks for
        raise pickle.UnpicklingError("the pickle has bytes of no known form")
    limits.spend(2 * len(content))
    return bytearray(content)


def _set(limits: Limits, items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError("the pickle has a set of no known form")
    limits.spend(8 * len(items))
    for item in items:
        limits.check_key(item)
    return set(items)


def _frozen_set(limits: Limits, items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(limits, items))


def _complex(_: Limits, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise pickle.UnpicklingError("the pickle has a complex number of no known form")
    return complex(real, imaginary)


def _ordered_dict(_: Limits) -> dict[Any, Any]:
    return {}


def _size(_: Limits, numbers: Any) -> tuple[int, ...]:
    _check_numbers(numbers)
    return numbers


def _device(_: Limits, kind: Any, *_number: Any) -> str:
    if type(kind) is not str:
        raise pickle.UnpicklingError("the pickle has a device of no known form")
    return kind


def _nothing(*_: Any) -> None:
    raise pickle.UnpicklingError("the pickle calls a class that is only to be named")


_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("_codecs", "encode"): _encoded,
    ("numpy", "ndarray"): _nothing,
    ("numpy", "dtype"): _numpy_type,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch._utils", "_rebuild_tensor"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
for _module in ("numpy._core", "numpy.core"):  # of NumPy 2 and 1
    _MAKERS[f"{_module}.multiarray", "_reconstruct"] = _array_to_fill
    _MAKERS[f"{_module}.multiarray", "scalar"] = _numpy_scalar
    _MAKERS[f"{_module}.numeric", "_frombuffer"] = _array_of_buffer
for _module in ("builtins", "__builtin__"):  # the second in protocols 0 to 2
    _MAKERS[_module, "bytes"] = _bytes
    _MAKERS[_module, "bytearray"] = _byte_array
    _MAKERS[_module, "set"] = _set
    _MAKERS[_module, "frozenset"] = _frozen_set
    _MAKERS[_module, "complex"] = _complex

NAMES: dict[tuple[str, str], Any] = {
    key: Name(text=".".join(key), make=make) for key, make in _MAKERS.items()
}
"""(module, name) -> what it stands for."""

STORAGE_TYPES = {
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "ComplexFloatStorage"): torch.complex64,
    ("torch", "ComplexDoubleStorage"): torch.complex128,
    ("torch.storage", "UntypedStorage"): torch.uint8,
}
_DTYPES = {
    *STORAGE_TYPES.values(),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
NAMES |= STORAGE_TYPES
NAMES |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES}
