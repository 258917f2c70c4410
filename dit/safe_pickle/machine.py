"""The opcodes of a pickle."""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from dit.safe_pickle.limits import Limits, kind_of
from dit.safe_pickle.values import Name, NumpyType, fill_array

_MOST_OPCODES = 1_000_000
# Without those of registered extensions, of instances as Python 1 wrote them, of buffers outside
# the file, of arguments by name, of persistent ids as text, and of Python 2's 8-bit strings.
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
    """Opcode -> its method; each look-up is counted, so that a file cannot go on for ever."""

    def __init__(self, handlers: dict[int, Any]):
        super().__init__(handlers)
        self._left = _MOST_OPCODES

    def __getitem__(self, code: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise pickle.UnpicklingError(f"the pickle has over {_MOST_OPCODES} opcodes")
        return super().__getitem__(code)

    def __missing__(self, code: int) -> Any:
        word = _WORDS.get(code, f"0x{code:02x}")
        raise pickle.UnpicklingError(f"the pickle has the opcode {word}, which is not allowed here")


# The one in Python, since the one in C fills memory up to any number of a PUT, looks extensions up
# in a cache of the process, hashes any key, and sets attributes of any object.
class Machine(pickle._Unpickler):
    """Runs one pickle; what it makes is `names` and plain values, made under `limits`."""

    # Those of the base that its type stub leaves out.
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
        # The base has one for all of its instances.
        self.dispatch = _Handlers(_HANDLERS)  # pyright: ignore[reportAttributeAccessIssue]

    def find_class(self, module: str, name: str) -> Any:
        """Looks a name up in the tables; nothing is ever imported."""
        key = (module, name)
        if key in self._classes:
            return self._classes[key]
        if key in self._names:
            return self._names[key]
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which is not allowed here")

    def persistent_load(self, pid: Any) -> Any:
        if self._storages is None:
            raise pickle.UnpicklingError("the pickle refers to something outside of itself")
        return self._storages(pid)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        called = self.stack[-1]
        if type(called) is not Name or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"the pickle calls {kind_of(called)}")
        self.stack[-1] = called.make(self._limits, *arguments)

    def _new(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack[-1]
        if not self._is_class(cls) or arguments != ():
            raise pickle.UnpicklingError(f"the pickle makes an instance of {kind_of(cls)}")
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
            raise pickle.UnpicklingError(f"the pickle sets the state of {kind_of(built)}")

    def _append(self) -> None:
        self._add([self.stack.pop()])

    def _appends(self) -> None:
        self._add(self.pop_mark())

    def _add(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError(f"the pickle appends to {kind_of(self.stack[-1])}")
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
            raise pickle.UnpicklingError(f"the pickle sets an item of {kind_of(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._limits.check_key(key)
            target[key] = value

    def _add_items(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError(f"the pickle adds to {kind_of(self.stack[-1])}")
        self.stack[-1].update(self._keys(items))

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(self._keys(items)))

    def _keys(self, items: list[Any]) -> list[Any]:
        for item in items:
            self._limits.check_key(item)
        return items

    def _byte_array(self) -> None:
        """As it stands in Python, it allocates what the file says before it has read anything."""
        (size,) = struct.unpack("<Q", self.read(8))
        self._limits.spend(size)
        content = bytearray(self.read(size))
        if len(content) != size:
            raise pickle.UnpicklingError("the pickle is cut short")
        self.append(content)


_HANDLERS = {_CODES[word]: pickle._Unpickler.dispatch[_CODES[word]] for word in _ALLOWED} | {
    _CODES["REDUCE"]: Machine._reduce,
    _CODES["NEWOBJ"]: Machine._new,
    _CODES["BUILD"]: Machine._build,
    _CODES["APPEND"]: Machine._append,
    _CODES["APPENDS"]: Machine._appends,
    _CODES["SETITEM"]: Machine._set_item,
    _CODES["SETITEMS"]: Machine._set_items,
    _CODES["DICT"]: Machine._dict,
    _CODES["ADDITEMS"]: Machine._add_items,
    _CODES["FROZENSET"]: Machine._frozen_set,
    _CODES["BYTEARRAY8"]: Machine._byte_array,
}
