"""The names that a pickle may contain, the values that they build, and limits on both.

A name in a pickle never leads to the function of that name, because such functions trust their
arguments, and some import, allocate or call whatever a file asks for. Each name leads to a function
of this module instead, which checks its arguments.
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
    """How much memory and how many keys a pickle may still use; counted down during reading."""

    def __init__(self, size: int):
        # An array in an archive takes its size four times: as text, as bytes, twice as an array.
        self._bytes = 8 * size + _SLACK
        self._keys = _MOST_KEYS
        self._expanded = size + _EXPANDED

    def spend(self, size: int) -> None:
        """Counts `size` bytes that are about to be allocated.

        Raises:
            pickle.UnpicklingError: `size` is more than is left.
        """
        self._bytes -= size
        if size < 0 or self._bytes < 0:
            raise pickle.UnpicklingError(
                "the pickle asks for far more memory than it has bytes; it is damaged or"
                " malicious: get the file again from a source that you trust"
            )

    def check_size(self, size: int) -> None:
        """Refuses a tensor whose copy would have `size` bytes, if that is too large.

        Strides may repeat numbers, so a tensor may be larger than its storage.

        Raises:
            pickle.UnpicklingError: `size` is far larger than the pickle.
        """
        if size > self._expanded:
            raise pickle.UnpicklingError(
                f"the pickle describes a tensor of {size} bytes, far more than the file has; save"
                " tensor.contiguous() instead"
            )

    def check_key(self, key: Any) -> None:
        """Counts and checks a `key` of a dict or set; text is not counted.

        Many keys with equal hashes would take very long.

        Raises:
            pickle.UnpicklingError: there are too many keys, or `key` is neither a plain value nor a
                tuple of plain values.
        """
        if type(key) is str:
            return
        self._keys -= 1
        if self._keys < 0:
            raise pickle.UnpicklingError(
                f"the pickle has more than {_MOST_KEYS} keys that are not text; save dictionaries"
                " and sets with fewer keys, or with text as keys"
            )
        inner = key if type(key) is tuple else (key,)
        for item in inner:
            if type(item) not in _SCALARS or (type(item) is int and abs(item) > 2**64):
                raise pickle.UnpicklingError(
                    f"the pickle has a key with {type_in_words(item)}; save it with text, or with"
                    " numbers up to 2**64, as keys"
                )
        if len(inner) > _MOST_PARTS:
            raise pickle.UnpicklingError(
                f"the pickle has a key of {len(inner)} parts, more than {_MOST_PARTS}; save it"
                " with shorter keys"
            )


def check_plain(value: Any, classes: frozenset[type]) -> None:
    """Checks that a program can safely walk, print or store `value`.

    A container that contains itself has no end; nested repetitions make the number of items
    exponential.

    Raises:
        pickle.UnpicklingError: `value` is not a plain value, too large or nested too deeply.
    """
    left, count = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        count += 1
        inner = _inside(item, classes)
        if depth > _MOST_DEPTH or count + len(left) + len(inner) > _MOST_VALUES:
            raise pickle.UnpicklingError(
                f"the pickle holds itself, has more than {_MOST_VALUES} values, or has values"
                f" nested more than {_MOST_DEPTH} deep; save fewer and flatter values"
            )
        left += [(one, depth + 1) for one in inner]


def _inside(item: Any, classes: frozenset[type]) -> list[Any] | tuple[Any, ...]:
    kind = type(item)
    if kind in _LEAVES or kind in classes:
        return ()
    if kind is str:
        item.encode()  # raises for half of a surrogate pair, which no file can hold
        return ()
    if kind is dict:
        return [*item, *item.values()]
    if kind in (list, tuple, set, frozenset):
        return list(item)
    if kind is np.ndarray or isinstance(item, np.generic):
        if item.dtype.str[1:] in NUMPY_TYPES:
            return ()
        raise pickle.UnpicklingError(
            f"the pickle holds NumPy values of dtype {item.dtype}, which is not numeric; save them"
            " as numbers or as plain text"
        )
    raise pickle.UnpicklingError(
        f"the pickle holds {type_in_words(item)}, which is not allowed here; save only tensors,"
        " NumPy arrays and plain values"
    )


def type_in_words(item: Any) -> str:
    """A word for `item` in messages: the text of a `Name`, else its type."""
    return getattr(item, "text", None) or f"an object of type {type(item).__name__}"


def short(what: object) -> str:
    """`what` on one printable line, since a message may quote bytes of the file."""
    text = str(what)[: 2 * _MESSAGE]
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MESSAGE else f"{text[:_MESSAGE]}..."


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A stand-in for a function or class that a pickle names; the pickle cannot change it."""

    text: str
    make: Callable[..., Any]
    """Function of (limits, arguments in the pickle) that builds the value."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes and the dtype of a tensor's storage."""

    dtype: torch.dtype
    content: Tensor  # uint8 [bytes]

    @classmethod
    def of(cls, dtype: torch.dtype, content: bytearray) -> Storage:
        """The storage of `content`, which is not copied."""
        if not content:  # torch.frombuffer refuses an empty buffer
            return cls(dtype, torch.empty(0, dtype=torch.uint8))
        return cls(dtype, torch.frombuffer(content, dtype=torch.uint8))


@dataclass(slots=True, eq=False)
class NumpyType:
    """A NumPy dtype whose byte order the pickle sets afterwards."""

    kind: str
    order: str = "<"

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(
                "the pickle has a NumPy dtype in an unknown form; save the array as a torch tensor"
            )
        self.order = state[1]

    def array(self, content: Any) -> np.ndarray:
        """An array of one axis from `content`, in the byte order of this machine."""
        given = np.frombuffer(content, np.dtype(self.order + self.kind))
        return given.astype(given.dtype.newbyteorder("="), copy=False)


def fill_array(limits: Limits, array: np.ndarray, state: Any) -> None:
    """Fills the empty `array` with the checked `state` of a pickle, as `ndarray.__setstate__` does.

    `array` is what `_array_to_fill` returned for NumPy's `_reconstruct`.
    """
    _version, shape, dtype, fortran, content = state
    if array.shape != (0,) or array.dtype != np.int8:
        raise pickle.UnpicklingError(
            "the pickle fills a NumPy array twice; it is damaged: save the array again"
        )
    _check_array(shape, dtype, content)
    limits.spend(2 * len(content))
    values = dtype.array(content)
    state = (1, shape, values.dtype, bool(fortran), values.tobytes())
    array.__setstate__(state)  # pyright: ignore[reportArgumentType] - takes Python's bool alone


def _check_array(shape: Any, dtype: Any, content: Any) -> None:
    _check_numbers(shape)
    if type(dtype) is not NumpyType or type(content) not in (bytes, bytearray):
        raise pickle.UnpicklingError(
            "the pickle has a NumPy array in an unknown form; save the array as a torch tensor"
        )
    size = math.prod(shape) * np.dtype(dtype.kind).itemsize
    if size != len(content):
        raise pickle.UnpicklingError(
            f"the pickle has an array of shape {list(shape)} with {len(content)} bytes instead of"
            f" {size}; save the array again"
        )


def _check_numbers(numbers: Any) -> None:
    if type(numbers) is not tuple:
        kind = type_in_words(numbers)
        raise pickle.UnpicklingError(
            f"the pickle has a shape that is {kind}, not a tuple; save the tensor or array again"
        )
    if len(numbers) > MOST_AXES:
        raise pickle.UnpicklingError(
            f"the pickle has a shape of {len(numbers)} axes, more than {MOST_AXES}; save the"
            " tensor or array with fewer axes"
        )
    if wrong := [n for n in numbers if type(n) is not int or not 0 <= n < 2**48]:
        shown = wrong[0] if type(wrong[0]) is int and abs(wrong[0]) < 2**64 else "an unusable value"
        raise pickle.UnpicklingError(
            f"the pickle has a shape with {shown} in it, instead of whole numbers from 0 to 2**48;"
            " save the tensor or array again"
        )


def _array_to_fill(_: Limits, kind: Name, _shape: Any, _dtype: Any) -> np.ndarray:
    if kind is not NAMES["numpy", "ndarray"]:
        raise pickle.UnpicklingError(
            "the pickle has an array of another class than numpy.ndarray; save"
            " numpy.asarray(array) instead"
        )
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
        raise pickle.UnpicklingError(
            f"the pickle names the NumPy type {kind}, which is not numeric; save the array with a"
            " numeric type, such as float32"
        )
    return NumpyType(name)


def _tensor(
    limits: Limits, storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype
) -> Tensor:
    """A tensor as a view of `storage`, as `torch.Tensor.set_` makes it."""
    _check_numbers(size)
    _check_numbers(stride)
    _check_numbers((offset,))
    if len(size) != len(stride):
        raise pickle.UnpicklingError(
            f"the pickle has a tensor with {len(size)} sizes but {len(stride)} strides; save the"
            " tensor again with torch.save"
        )
    # max(1, n): an axis of length 0 must not hide the product of the others.
    limits.check_size(math.prod(max(1, n) for n in size) * dtype.itemsize)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    numbers = storage.content.view(dtype)
    if math.prod(size) and last >= len(numbers):
        raise pickle.UnpicklingError(
            f"the pickle has a tensor of shape {list(size)}, but only {len(numbers)} numbers for"
            " it; save the tensor again with torch.save"
        )
    if not math.prod(size):
        return torch.empty(size, dtype=dtype)
    return numbers.as_strided(size, stride, offset)


_LAZY = (
    "the pickle has a tensor that is conjugate or negated; save"
    " tensor.resolve_conj().resolve_neg() instead"
)


def _tensor_v2(
    limits: Limits, storage: Any, offset: Any, size: Any, stride: Any, *more: Any
) -> Any:
    if len(more) > 2 and more[2]:
        raise pickle.UnpicklingError(_LAZY)
    return _tensor(limits, storage, offset, size, stride, storage.dtype)


def _tensor_v3(
    limits: Limits, storage: Any, offset: Any, size: Any, stride: Any, *more: Any
) -> Any:
    _grad, _hooks, dtype, *metadata = more
    if any(metadata):
        raise pickle.UnpicklingError(_LAZY)
    return _tensor(limits, storage, offset, size, stride, dtype)


def _parameter(_: Limits, data: Any, *_flags: Any) -> Tensor:
    if type(data) is not Tensor:
        raise pickle.UnpicklingError(
            f"the pickle has a parameter that is {type_in_words(data)}, not a tensor; save the"
            " parameter again with torch.save"
        )
    return data


def _encoded(limits: Limits, text: Any, encoding: Any) -> bytes:
    """The bytes that `text` stands for; pickles of protocol 0 to 2 write bytes as text."""
    if encoding not in ("latin1", "latin-1") or type(text) is not str:
        raise pickle.UnpicklingError(
            "the pickle has bytes in an encoding other than latin1; save them again with pickle"
            " protocol 3 or newer"
        )
    limits.spend(len(text))
    return text.encode("latin1")


def _bytes(limits: Limits, content: Any = b"") -> bytes:
    return bytes(_byte_array(limits, content))


def _byte_array(limits: Limits, content: Any = b"") -> bytearray:
    if type(content) is not bytes:  # bytearray(10**12) would allocate that many bytes
        raise pickle.UnpicklingError(
            f"the pickle makes bytes from {type_in_words(content)}; save them again with pickle"
            " protocol 3 or newer"
        )
    limits.spend(2 * len(content))
    return bytearray(content)


def _set(limits: Limits, items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError(
            f"the pickle makes a set from {type_in_words(items)}, not from a list; save the set"
            " again"
        )
    limits.spend(8 * len(items))
    for item in items:
        limits.check_key(item)
    return set(items)


def _frozen_set(limits: Limits, items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(limits, items))


def _complex(_: Limits, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise pickle.UnpicklingError(
            "the pickle has a complex number whose parts are not both floats; save the number again"
        )
    return complex(real, imaginary)


def _ordered_dict(_: Limits) -> dict[Any, Any]:
    return {}


def _size(_: Limits, numbers: Any) -> tuple[int, ...]:
    _check_numbers(numbers)
    return numbers


def _device(_: Limits, kind: Any, *_number: Any) -> str:
    if type(kind) is not str:
        raise pickle.UnpicklingError(
            f"the pickle has a torch.device whose name is {type_in_words(kind)}, not text; save"
            " the object without it"
        )
    return kind


def _nothing(*_: Any) -> None:
    raise pickle.UnpicklingError(
        "the pickle calls numpy.ndarray, which is not allowed here; save the array as a torch"
        " tensor"
    )


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
"""The stand-in for each (module, name) that a pickle may contain."""

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
