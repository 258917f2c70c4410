"""Reads the opcodes of a pickle, and both archives of `torch.save` with their tensors.

- ZIP: `NAME/data.pkl`, `NAME/data/0`, `NAME/data/1`, ...
- legacy: five pickles (a magic number, a version, facts of the machine, the object, keys of the
  storages), then for each key the number of elements and the elements. A plain pickle of a tensor
  holds such an archive for its storage.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch

from dit.safe_pickle.values import (
    NAMES,
    STORAGE_TYPES,
    Limits,
    Name,
    NumpyType,
    Storage,
    fill_array,
    type_in_words,
)

DAMAGE = (
    *(LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError),
    *(EOFError, OSError, MemoryError, AssertionError, BufferError, struct.error),
    zipfile.BadZipFile,
)
"""Errors that the parsers of Python and torch raise for bytes that are not a pickle."""
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_TYPES = set(STORAGE_TYPES.values())
_MOST_OPCODES = 1_000_000
# Left out: registered extensions, instances as Python 1 wrote them, buffers outside the file,
# arguments by name, persistent ids as text, and 8-bit strings of Python 2.
_ALLOWED = [
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2"),
    *("LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_SET", "ADDITEMS", "FROZENSET"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
]
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_WORDS = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


class _Handlers(dict[int, Any]):
    """The methods of the unpickler that handle opcodes, by opcode.

    Look-ups are counted, so that a file cannot keep the program busy for ever.
    """

    def __init__(self, handlers: dict[int, Any]):
        super().__init__(handlers)
        self._left = _MOST_OPCODES

    def __getitem__(self, code: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise pickle.UnpicklingError(
                f"the pickle has more than {_MOST_OPCODES} instructions, too many to read; save"
                " fewer objects in one file"
            )
        return super().__getitem__(code)

    def __missing__(self, code: int) -> Any:
        word = _WORDS.get(code, f"0x{code:02x}")
        raise pickle.UnpicklingError(
            f"the pickle has the instruction {word}, which is not allowed here; save tensors and"
            " plain values again with torch.save"
        )


# Python's unpickler in Python: the one in C allocates a memo as large as the number in a PUT, looks
# extensions up in a cache of the process, hashes any key, and sets attributes of any object.
class SafeUnpickler(pickle._Unpickler):
    """Reads one pickle into plain values and the values of `names`, within `limits`."""

    # Members of the base that its type stub leaves out.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    load_build: Callable[[], None]

    def __init__(
        self,
        file: BinaryIO,
        *,
        limits: Limits,
        names: Mapping[tuple[str, str], Any],
        classes: Mapping[tuple[str, str], type] | None = None,
        storages: Callable[[Any], Any] | None = None,
    ):
        super().__init__(file)
        self._limits, self._names, self._storages = limits, names, storages
        self._classes = classes or {}
        # In the base, all instances share one table.
        self.dispatch = _Handlers(_HANDLERS)  # pyright: ignore[reportAttributeAccessIssue]

    def find_class(self, module: str, name: str) -> Any:
        """Looks a name up in the tables; nothing is ever imported."""
        key = (module, name)
        if key in self._classes:
            return self._classes[key]
        if key in self._names:
            return self._names[key]
        raise pickle.UnpicklingError(
            f"the pickle names {module}.{name}, which is not allowed here; save only tensors,"
            " NumPy arrays and plain values"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._storages is None:
            raise pickle.UnpicklingError(
                "the pickle refers to data outside of the file; save the object again with"
                " torch.save"
            )
        return self._storages(pid)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        called = self.stack[-1]
        if type(called) is not Name or type(arguments) is not tuple:
            raise pickle.UnpicklingError(
                f"the pickle calls {type_in_words(called)}, which is not allowed here; save only"
                " tensors, NumPy arrays and plain values"
            )
        self.stack[-1] = called.make(self._limits, *arguments)

    def _new(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack[-1]
        if not self._is_class(cls) or arguments != ():
            raise pickle.UnpicklingError(
                f"the pickle makes an instance of {type_in_words(cls)}, which is not allowed here;"
                " save only tensors, NumPy arrays and plain values"
            )
        self.stack[-1] = cls.__new__(cls)

    def _is_class(self, cls: Any) -> bool:
        return any(cls is allowed for allowed in self._classes.values())

    def _build(self) -> None:
        built = self.stack[-2]
        if self._is_class(type(built)):
            self.load_build()
            return
        state = self.stack.pop()
        if type(built) is np.ndarray:
            fill_array(self._limits, built, state)
        elif type(built) is NumpyType:
            built.build(state)
        else:
            raise pickle.UnpicklingError(
                f"the pickle sets the state of {type_in_words(built)}, which is not allowed here;"
                " save only tensors, NumPy arrays and plain values"
            )

    def _append(self) -> None:
        self._add([self.stack.pop()])

    def _appends(self) -> None:
        self._add(self.pop_mark())

    def _add(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError(
                f"the pickle appends items to {type_in_words(self.stack[-1])} instead of a list;"
                " it is damaged: save the object again with torch.save"
            )
        self.stack[-1].extend(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict and not (
            isinstance(target, dict) and self._is_class(type(target))
        ):
            raise pickle.UnpicklingError(
                f"the pickle sets an item of {type_in_words(target)} instead of a dict; it is"
                " damaged: save the object again with torch.save"
            )
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._limits.check_key(key)
            target[key] = value

    def _add_items(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError(
                f"the pickle adds items to {type_in_words(self.stack[-1])} instead of a set; it is"
                " damaged: save the object again with torch.save"
            )
        self.stack[-1].update(self._keys(items))

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(self._keys(items)))

    def _keys(self, items: list[Any]) -> list[Any]:
        for item in items:
            self._limits.check_key(item)
        return items

    def _byte_array(self) -> None:
        """Reads a byte array; pickle's own method allocates the stated size before it reads."""
        (size,) = struct.unpack("<Q", self.read(8))
        self._limits.spend(size)
        content = bytearray(self.read(size))
        if len(content) != size:
            raise pickle.UnpicklingError(
                f"the pickle is cut short: a byte array has {len(content)} of its {size} bytes;"
                " copy or save the file again"
            )
        self.append(content)


_HANDLERS = {_CODES[word]: pickle._Unpickler.dispatch[_CODES[word]] for word in _ALLOWED} | {
    _CODES["REDUCE"]: SafeUnpickler._reduce,
    _CODES["NEWOBJ"]: SafeUnpickler._new,
    _CODES["BUILD"]: SafeUnpickler._build,
    _CODES["APPEND"]: SafeUnpickler._append,
    _CODES["APPENDS"]: SafeUnpickler._appends,
    _CODES["SETITEM"]: SafeUnpickler._set_item,
    _CODES["SETITEMS"]: SafeUnpickler._set_items,
    _CODES["DICT"]: SafeUnpickler._dict,
    _CODES["ADDITEMS"]: SafeUnpickler._add_items,
    _CODES["FROZENSET"]: SafeUnpickler._frozen_set,
    _CODES["BYTEARRAY8"]: SafeUnpickler._byte_array,
}


def read(data: bytes, classes: Mapping[tuple[str, str], type]) -> Any:
    limits = Limits(len(data))
    if data[:4] == b"PK\x03\x04":
        return _read_zip(data, limits, classes)
    file = io.BytesIO(data)
    value = SafeUnpickler(file, limits=limits, names=_NAMES_OF_PLAIN, classes=classes).load()
    if type(value) is int and value == _MAGIC:
        return _read_legacy(file, len(data), limits)
    return value


def _read_zip(data: bytes, limits: Limits, classes: Mapping[tuple[str, str], type]) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise pickle.UnpicklingError(
                f"the ZIP archive has {len(pickles)} entries data.pkl instead of the one that"
                " torch.save writes; save the object again with torch.save"
            )
        folder, found = pickles[0].removesuffix("data.pkl"), dict[str, Storage]()
        order = f"{folder}byteorder"
        if order in archive.namelist() and _entry(archive, order, limits) != b"little":
            raise pickle.UnpicklingError(
                "the archive was written on a big-endian machine; save the object again on a"
                " little-endian one, such as a PC"
            )

        def storage(pid: Any) -> Storage:
            dtype, key, size = _described(pid, parts=5)
            if key not in found:
                content = _entry(archive, f"{folder}data/{key}", limits)
                found[key] = Storage.of(dtype, bytearray(content))
            if found[key].dtype != dtype or len(found[key].content) != size:
                raise pickle.UnpicklingError(
                    f"the archive is damaged: data/{key} has {len(found[key].content)} bytes of"
                    f" {found[key].dtype}, not {size} of {dtype}; copy or save the file again"
                )
            return found[key]

        file = io.BytesIO(_entry(archive, pickles[0], limits))
        return SafeUnpickler(
            file, limits=limits, names=NAMES, classes=classes, storages=storage
        ).load()


def _entry(archive: zipfile.ZipFile, name: str, limits: Limits) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise pickle.UnpicklingError(
            f"the archive's {name} is compressed, which torch.save never does; save the object"
            " again with torch.save"
        )
    if not entry.CRC:
        del entry.CRC  # torch.save can leave checksums out; zipfile then has none to check
    limits.spend(2 * entry.file_size)
    content = archive.read(entry)
    if len(content) != entry.file_size:
        raise pickle.UnpicklingError(
            f"the archive's {name} has {len(content)} of its {entry.file_size} bytes; copy or save"
            " the file again"
        )
    return content


def _described(pid: Any, *, parts: int) -> tuple[torch.dtype, str, int]:
    """(dtype, key, size in bytes) of the storage that the persistent id `pid` denotes."""
    if type(pid) is not tuple or len(pid) != parts or pid[0] != "storage":
        raise pickle.UnpicklingError(
            "the pickle refers to something other than the storage of a tensor; save the object"
            " again with torch.save"
        )
    _, dtype, key, _device, numbers, *view = pid
    if type(key) is not str or type(numbers) is not int or numbers < 0 or any(view):
        raise pickle.UnpicklingError(
            "the pickle describes the storage of a tensor in an unknown form; save the tensor"
            " again with torch.save"
        )
    if type(dtype) is not torch.dtype or dtype not in _TYPES:
        raise pickle.UnpicklingError(
            "the pickle has a tensor of a dtype that is not supported here; convert it to float32,"
            " and save it again with torch.save"
        )
    return dtype, key, numbers * dtype.itemsize


def _read_legacy(file: BinaryIO, size: int, limits: Limits) -> Any:
    """The object of a legacy archive, whose magic number has been read."""
    found = dict[str, tuple[Storage, bytearray]]()

    def storage(pid: Any) -> Storage:
        dtype, key, length = _described(pid, parts=6)
        if key not in found:
            if length > size:
                raise pickle.UnpicklingError(
                    f"the pickle is cut short: the storage {key} has {length} bytes, more than the"
                    f" whole file ({size} bytes); copy or save the file again"
                )
            limits.spend(length)
            content = bytearray(length)
            found[key] = (Storage.of(dtype, content), content)
        return found[key][0]

    def one(**options: Any) -> Any:
        return SafeUnpickler(file, limits=limits, names=NAMES, **options).load()

    version, machine, value = one(), one(), one(storages=storage)
    if version != _VERSION or type(machine) is not dict or not machine.get("little_endian"):
        raise pickle.UnpicklingError(
            f"the archive has another version than {_VERSION}, or was written on a big-endian"
            " machine; save the object again with torch.save on a PC"
        )
    keys = one()
    if type(keys) is not list or sorted(keys) != sorted(found):
        raise pickle.UnpicklingError(
            "the archive does not list the storages that its tensors use; copy or save the file"
            " again"
        )
    for key in keys:
        stored, content = found[key]
        (numbers,) = struct.unpack("<q", file.read(8))
        given = file.read(len(content))
        if numbers * stored.dtype.itemsize != len(content) or len(given) != len(content):
            raise pickle.UnpicklingError(
                f"the archive is cut short: the storage {key} does not have its {len(content)}"
                " bytes; copy or save the file again"
            )
        content[:] = given
    return value


def _storage_of(limits: Limits, data: Any) -> Storage:
    """The storage of a tensor in a plain pickle: `data` is a legacy archive inside it."""
    if type(data) is not bytes:
        raise pickle.UnpicklingError(
            "the pickle describes the storage of a tensor in an unknown form; save the tensor"
            " again with torch.save"
        )
    limits.spend(len(data))
    file = io.BytesIO(data)
    if SafeUnpickler(file, limits=limits, names=NAMES).load() != _MAGIC:
        raise pickle.UnpicklingError(
            "the pickle describes the storage of a tensor in an unknown form; save the tensor"
            " again with torch.save"
        )
    value = _read_legacy(file, len(data), limits)
    if type(value) is not Storage:
        raise pickle.UnpicklingError(
            "the pickle describes the storage of a tensor in an unknown form; save the tensor"
            " again with torch.save"
        )
    return value


# Functions by which a pickled tensor loads its storage. Processes that have imported Megatron-Core
# 0.17 or newer write the second name.
_NAMES_OF_PLAIN = NAMES | {
    key: Name(text=".".join(key), make=_storage_of)
    for key in (
        ("torch.storage", "_load_from_bytes"),
        ("megatron.core.safe_globals", "safe_load_from_bytes"),
    )
}
