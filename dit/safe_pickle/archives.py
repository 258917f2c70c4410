"""Plain pickles, and the two archives of `torch.save`, whose tensors lie beside the pickle.

- ZIP: `NAME/data.pkl`, `NAME/data/0`, `NAME/data/1`, ...
- legacy, which is also what a plain pickle of a tensor holds for its storage: five pickles (a
  magic number, a version, facts of the machine, the object, keys of the storages), then for each
  key the number of elements and the elements.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from dit.safe_pickle.limits import Limits
from dit.safe_pickle.machine import Machine
from dit.safe_pickle.values import NAMES, STORAGE_TYPES, Name, Storage

DAMAGE = (
    *(LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError),
    *(EOFError, OSError, MemoryError, AssertionError, BufferError, struct.error),
    zipfile.BadZipFile,
)
"""What bytes that are no pickle provoke in the parsers of Python and torch."""
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_TYPES = set(STORAGE_TYPES.values())


def read(data: bytes, classes: Mapping[tuple[str, str], type]) -> Any:
    limits = Limits(len(data))
    if data[:4] == b"PK\x03\x04":
        return _read_zip(data, limits, classes)
    file = io.BytesIO(data)
    value = Machine(file, limits=limits, names=_NAMES_OF_PLAIN, classes=classes).load()
    if type(value) is int and value == _MAGIC:
        return _read_legacy(file, len(data), limits)
    return value


def _read_zip(data: bytes, limits: Limits, classes: Mapping[tuple[str, str], type]) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise pickle.UnpicklingError("the ZIP archive is not one of torch.save")
        folder, found = pickles[0].removesuffix("data.pkl"), dict[str, Storage]()
        order = f"{folder}byteorder"
        if order in archive.namelist() and _entry(archive, order, limits) != b"little":
            raise pickle.UnpicklingError("the archive is of a big-endian machine")

        def storage(pid: Any) -> Storage:
            dtype, key, size = _described(pid, parts=5)
            if key not in found:
                content = _entry(archive, f"{folder}data/{key}", limits)
                found[key] = Storage.of(dtype, bytearray(content))
            if found[key].dtype != dtype or len(found[key].content) != size:
                raise pickle.UnpicklingError(f"the archive's data/{key} is not of {size} bytes")
            return found[key]

        file = io.BytesIO(_entry(archive, pickles[0], limits))
        return Machine(file, limits=limits, names=NAMES, classes=classes, storages=storage).load()


def _entry(archive: zipfile.ZipFile, name: str, limits: Limits) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise pickle.UnpicklingError(f"the archive's {name} is compressed")
    if not entry.CRC:
        del entry.CRC  # torch can be told to leave them out, and zipfile to check none
    limits.spend(2 * entry.file_size)
    content = archive.read(entry)
    if len(content) != entry.file_size:
        raise pickle.UnpicklingError(f"the archive's {name} is cut short")
    return content


def _described(pid: Any, *, parts: int) -> tuple[torch.dtype, str, int]:
    """Type, key and bytes of the storage that a persistent id names."""
    if type(pid) is not tuple or len(pid) != parts or pid[0] != "storage":
        raise pickle.UnpicklingError("the pickle refers to something that is no storage")
    _, dtype, key, _device, numbers, *view = pid
    if type(key) is not str or type(numbers) is not int or numbers < 0 or any(view):
        raise pickle.UnpicklingError("the pickle has a storage of no known form")
    if type(dtype) is not torch.dtype or dtype not in _TYPES:
        raise pickle.UnpicklingError("the pickle has a storage of no known type")
    return dtype, key, numbers * dtype.itemsize


def _read_legacy(file: BinaryIO, size: int, limits: Limits) -> Any:
    """From behind the magic number."""
    found = dict[str, tuple[Storage, bytearray]]()

    def storage(pid: Any) -> Storage:
        dtype, key, length = _described(pid, parts=6)
        if key not in found:
            if length > size:
                raise pickle.UnpicklingError("the pickle is cut short")
            limits.spend(length)
            content = bytearray(length)
            found[key] = (Storage.of(dtype, content), content)
        return found[key][0]

    def one(**options: Any) -> Any:
        return Machine(file, limits=limits, names=NAMES, **options).load()

    version, machine, value = one(), one(), one(storages=storage)
    if version != _VERSION or type(machine) is not dict or not machine.get("little_endian"):
        raise pickle.UnpicklingError("the archive is of another version or a big-endian machine")
    keys = one()
    if type(keys) is not list or sorted(keys) != sorted(found):
        raise pickle.UnpicklingError("the archive lacks some of its storages")
    for key in keys:
        stored, content = found[key]
        (numbers,) = struct.unpack("<q", file.read(8))
        given = file.read(len(content))
        if numbers * stored.dtype.itemsize != len(content) or len(given) != len(content):
            raise pickle.UnpicklingError("the archive is cut short")
        content[:] = given
    return value


def _storage_of(limits: Limits, data: Any) -> Storage:
    """The storage of a tensor in a plain pickle, which is a legacy archive inside of it."""
    if type(data) is not bytes:
        raise pickle.UnpicklingError("the pickle has a storage of no known form")
    limits.spend(len(data))
    file = io.BytesIO(data)
    if Machine(file, limits=limits, names=NAMES).load() != _MAGIC:
        raise pickle.UnpicklingError("the pickle has a storage of no known form")
    value = _read_legacy(file, len(data), limits)
    if type(value) is not Storage:
        raise pickle.UnpicklingError("the pickle has a storage of no known form")
    return value


# By these a pickled tensor loads its storage. The second stands in pickles of processes that have
# imported Megatron-Core 0.17 or newer.
_NAMES_OF_PLAIN = NAMES | {
    key: Name(text=".".join(key), make=_storage_of)
    for key in (
        ("torch.storage", "_load_from_bytes"),
        ("megatron.core.safe_globals", "safe_load_from_bytes"),
    )
}
