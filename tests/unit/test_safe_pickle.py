"""Pickles of strangers: what is plain comes back as it was, and nothing else ever runs."""

from __future__ import annotations

import bz2
import copyreg
import gzip
import io
import os
import pickle
import resource
import struct
import subprocess
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit import safe_pickle
from tests.hostile import damaged
from tests.pickles import VALUES, Bomb, assert_same, nothing_runs, opcodes, saved

ARCHIVES = [{}, {"_use_new_zipfile_serialization": False}]


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """What is imported when it is first needed would be seen as the work of a pickle."""
    ours = _zip_of(pickle.dumps(None), {})
    for data in (*(pickle.dumps(VALUES, p) for p in range(6)), saved(VALUES), ours):
        safe_pickle.loads(data)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles(protocol: int) -> None:
    for name, value in VALUES.items():
        with nothing_runs():
            found = safe_pickle.loads(pickle.dumps(value, protocol))
        assert_same(found, value, name)
    assert_same(safe_pickle.loads(pickle.dumps(VALUES, protocol)), VALUES)


@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize("protocol", range(2, 6))
def test_archives_of_torch(archive: dict[str, bool], protocol: int) -> None:
    data = saved(VALUES, **archive, pickle_protocol=protocol)
    assert_same(safe_pickle.loads(data), VALUES)


def test_an_archive_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(VALUES)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(safe_pickle.loads(data), VALUES)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_tensors_that_share_their_numbers(archive: dict[str, bool]) -> None:
    whole = torch.arange(12.0)
    given = {"whole": whole, "parts": list(whole.reshape(3, 4)), "again": whole}
    assert_same(safe_pickle.loads(saved(given, **archive)), given)


def test_names_of_numpy_1() -> None:
    for value in (np.arange(3.0), np.float32(3)):
        for protocol in (2, 4):
            data = pickle.dumps(value, protocol).replace(b"numpy._core", b"numpy.core")
            if protocol == 4:  # the text says how long it is, and so does the frame
                data = data.replace(b"\x8c\x16numpy.core", b"\x8c\x15numpy.core")
                data = data[:2] + data[11:]
            assert_same(safe_pickle.loads(data), value)


def test_an_array_is_one_that_torch_takes() -> None:
    for name in ("C", "Fortran", "axes moved", "big-endian"):
        found = safe_pickle.loads(pickle.dumps(VALUES[name]))
        assert torch.equal(torch.from_numpy(found), torch.tensor(VALUES[name].tolist()))


class Own:
    def __init__(self) -> None:
        self.value = [1]


def test_named_classes_alone() -> None:
    data = pickle.dumps([Own(), {"a": Own()}])
    assert safe_pickle.loads(data, classes=[Own])[1]["a"].value == [1]
    with pytest.raises(pickle.UnpicklingError, match=r"safe_pickle\.Own, which"):
        safe_pickle.loads(data)


# ------------------------------------------------------------------------------ what wants to run


def _within(bomb: Any) -> dict[str, bytes]:
    """The same payload in every place where one could be overlooked."""
    plain = pickle.dumps(bomb)
    storage = opcodes(b"ctorch.storage\n_load_from_bytes\n", _bytes(plain), b"\x85R")
    cells = np.array([bomb, 1], dtype=object)
    squeezed = io.BytesIO()
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", plain)
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("archive/data.pkl", plain)
    return {
        **{f"protocol {p}": pickle.dumps(bomb, p) for p in range(6)},
        "unused key": pickle.dumps({"text": torch.ones(2), "unused": [({"deep": bomb},)]}),
        "torch.save": saved({"text": torch.ones(2), "unused": bomb}),
        "legacy torch.save": saved({"unused": bomb}, _use_new_zipfile_serialization=False),
        "as a storage": storage,
        "in an array of objects": pickle.dumps(cells),
        "in an array of objects, as protocol 2": pickle.dumps(cells, 2),
        "archive": stored.getvalue(),
        "compressed archive": squeezed.getvalue(),
        "gzip": gzip.compress(plain),
        "zlib": zlib.compress(plain),
        "bzip2": bz2.compress(plain),
    }


def _bytes(content: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(content)) + content


def _refused(data: bytes) -> str:
    with nothing_runs(), pytest.raises(pickle.UnpicklingError) as refused:
        safe_pickle.loads(data)
    message = str(refused.value)
    assert "weights_only" not in message and "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize(
    "bomb",
    [
        Bomb(os.system, "echo boom"),
        Bomb(eval, "print('boom')"),
        Bomb(exec, "print('boom')"),
        Bomb(getattr, "boom", "upper"),
        Bomb(__import__, "antigravity"),
        Bomb(subprocess.Popen, ["echo", "boom"]),
        Bomb(torch.hub.load, "a/b", "c"),
        Bomb(torch.load, "x.pt"),
        Bomb(np.load, "x.npy", None, True),
        Bomb(pickle.loads, pickle.dumps(1)),
        Bomb(open, "x", "w"),
        Bomb(bytearray, 10**12),
        Bomb(bytes, 10**12),
        Bomb(set, "text"),
        Bomb(np.dtype, "O"),
        Bomb(np.ndarray, (10**6,)),
        Bomb(torch.empty, 10**12),
        Bomb(torch.Tensor, 10**12),
    ],
    ids=lambda bomb: f"{bomb.function.__module__}.{bomb.function.__name__}",
)
def test_no_payload_runs(bomb: Bomb, capfd: pytest.CaptureFixture[str]) -> None:
    for place, data in _within(bomb).items():
        assert _refused(data), place
    assert "boom" not in "".join(capfd.readouterr())  # threads of other tests may say something


def test_the_refusal_says_what_the_pickle_names() -> None:
    assert "names posix.system, which is not allowed" in _refused(pickle.dumps(Bomb()))
    assert "names torch.hub.load, " in _refused(saved({"a": Bomb(torch.hub.load, "a", "b")}))
    assert "names os.sys\\ntem\\x1b, " in _refused(opcodes("os", "sys\ntem\x1b", b"\x93"))
    assert "compressed" in _refused(_within(Bomb())["compressed archive"])


NAME = b"ctorch._utils\n_rebuild_tensor_v2\n"
TENSOR = pickle.dumps(torch.zeros(2))[2:-1].replace(pickle.FRAME, b"\x95", 1)[9:]
ARRAY = pickle.dumps(np.zeros(2), 4)[11:-1]
ODD = {
    "extension": b"\x82\x01.",
    "extension of 2 bytes": b"\x83\x01\x00.",
    "extension of 4 bytes": b"\x84\x01\x00\x00\x00.",
    "INST": b"(S'echo boom'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nX\x04\x00\x00\x00echoo.",
    "OBJ of a known name": b"(" + NAME + b"o.",
    "NEWOBJ of a known name": opcodes(NAME, b")\x81"),
    "NEWOBJ_EX": opcodes(NAME, b")}\x92"),
    "text persistent id": b"Phello\n.",
    "persistent id": opcodes("hello", b"Q"),
    "buffer outside": b"\x80\x05\x97.",
    "name of a name": opcodes("torch._utils", "_rebuild_tensor_v2.__globals__", b"\x93"),
    "dotted": opcodes("collections", "abc.sys.modules", b"\x93"),
    "name from numbers": opcodes(b"K\x01K\x02\x93"),
    "call of a list": opcodes(b"])R"),
    "call of a type": opcodes(b"ctorch\nfloat32\n)R"),
    "call without a tuple": opcodes(b"ctorch\nSize\n]R"),
    "class only to be named": opcodes(b"cnumpy\nndarray\n)R"),
    "state of a name": opcodes(NAME, b"}", "__code__", b"K\x01sb"),
    "slots of a name": opcodes(NAME, b"N}", "make", b"K\x01s\x86b"),
    "state of a list": opcodes(b"]}b"),
    "state of a dict": opcodes(b"}N}", "items", b"K\x01s\x86b"),
    "state of a tensor": opcodes(TENSOR, b"}", "data", b"K\x01sb"),
    "item of a tensor": opcodes(TENSOR, b"K\x00K\x01s"),
    "item of an array": opcodes(ARRAY, b"K\x00K\x01s"),
    "array filled twice": opcodes(ARRAY, b"(K\x01K\x02\x85", "f8", b"\x89C\x00tb"),
    "append to a tuple": opcodes(b")K\x01a"),
    "append to a bytearray": opcodes(b"\x96", b"\x00" * 8, b"K\x01a"),
    "set from text": opcodes(b"cbuiltins\nset\n", "ab", b"\x85R"),
    "key of a list": opcodes(b"}]K\x01s"),
    "key of a tensor": opcodes(b"}", TENSOR, b"K\x01s"),
    "a name": opcodes(NAME),
    "a storage": opcodes(b"ctorch.storage\n_load_from_bytes\n", _bytes(b"x"), b"\x85R"),
    "a NumPy type": pickle.dumps(np.dtype("f4")),
    "an array of objects": pickle.dumps(np.array([None, "x"], dtype=object)),
    "an array of text": pickle.dumps(np.array(["x"])),
    "dates": pickle.dumps(np.array(["2020-01-01"], dtype="M8[D]")),
    "fields": pickle.dumps(np.zeros(2, dtype=[("a", "f4")])),
    "long double": pickle.dumps(np.zeros(2, dtype=np.longdouble)),
    "a masked array": pickle.dumps(np.ma.zeros(2)),
    "a sparse tensor": saved(torch.eye(3).to_sparse()),
    "a conjugate tensor": saved(torch.ones(2, dtype=torch.complex64).conj()),
    "half a surrogate": pickle.dumps("\ud800"),
    "a module": saved(torch.nn.Linear(2, 2)),
    "nothing": b"",
    "a stop": b".",
    "text": b"hello",
    "an archive of others": b"PK\x05\x06" + bytes(18),
    "PK": b"PK\x03\x04",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_pickles(name: str) -> None:
    _refused(ODD[name])


def test_an_extension_that_the_process_has_loaded_before() -> None:
    copyreg.add_extension("os", "getcwd", 240)
    try:
        data = b"\x82\xf0)R."
        assert pickle.loads(data) == os.getcwd()  # it is in the cache of the process from now on
        assert "EXT1" in _refused(data)
    finally:
        copyreg.remove_extension("os", "getcwd", 240)


# ------------------------------------------------------------------------------ bombs


def _doubled(kind: bytes, times: int) -> bytes:
    """A tuple that holds the one before it twice, again and again."""
    return opcodes(kind, *(b"2\x86" for _ in range(times)))


def _colliding(count: int) -> bytes:
    keys = (n * (2**61 - 1) for n in range(1, count))
    return opcodes(b"}(", *(pickle.dumps(key, 2)[2:-1] + b"N" for key in keys), b"u")


def _expanded(size: int) -> bytes:
    tensor = torch.ones(1)
    tensor = tensor.expand(size)
    return saved(tensor)


def _zip_of(pickled: bytes, storages: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in storages.items():
            archive.writestr(f"archive/data/{name}", content)
    return stream.getvalue()


def _one_storage_many_times(count: int) -> bytes:
    """Entries of the directory that all point at the same bytes."""
    names = [f"{n:05}" for n in range(count)]
    one = [
        b"(" + opcodes("storage")[2:-1] + b"ctorch\nFloatStorage\n"
        + opcodes(name)[2:-1] + opcodes("cpu")[2:-1] + b"J" + struct.pack("<i", 50_000) + b"tQ"
        for name in names
    ]  # fmt: skip
    pickled = b"\x80\x04" + b"(" + b"".join(one) + b"t."
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/00000", bytes(200_000))
        first = archive.infolist()[1]
        for name in names[1:]:
            alias = zipfile.ZipInfo(f"archive/data/{name}")
            for field in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(alias, field, getattr(first, field))
            archive.filelist.append(alias)
            archive.NameToInfo[alias.filename] = alias
    return stream.getvalue()


BIG = struct.pack("<Q", 2**40)
BOMBS = {
    "PUT": b"\x80\x02Nr\xff\xff\xff\x7f0.",
    "BYTEARRAY8": b"\x80\x05\x96" + BIG + b".",
    "BINBYTES8": b"\x80\x04\x8e" + BIG + b".",
    "BINUNICODE8": b"\x80\x04\x8d" + BIG + b".",
    "FRAME": b"\x80\x04\x95" + BIG + b".",
    "LONG4": b"\x8b\xff\xff\xff\x7f.",
    "decimal number": b"I" + b"9" * 100_000 + b"\n.",
    "bytearray of a number": opcodes(b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R"),
    "tuples as a value": _doubled(b")", 60),
    "tuples as a key": opcodes(b"}", _doubled(b")", 60)[2:-1], b"Ns"),
    "tuples in a set": opcodes(b"\x8f(", _doubled(b")", 60)[2:-1], b"\x90"),
    "depth": opcodes(b"]" * 200_000, b"a" * 199_999),
    "a list in itself": opcodes(b"]2a"),
    "keys that collide": _colliding(30_000),
    "lists": opcodes(b"]" * 1_500_000),
    "copies": opcodes(
        b"(", _bytes(bytes(100_000)), b"\x94", b"cbuiltins\nbytearray\nh\x00\x85R" * 5_000, b"t"
    ),
    "decoded text": opcodes(
        b"(", b"X\xa0\x86\x01\x00" + b"x" * 100_000, b"\x94",
        b"c_codecs\nencode\nh\x00\x8c\x06latin1\x86R" * 5_000, b"t",
    ),
    "an expanded tensor": _expanded(2**40),
    "an axis of 0": saved(torch.empty(2**40, 0)),
    "a storage of an archive": saved(torch.ones(3)).replace(b"K\x03tq", b"J\xff\xff\xff\x7ftq"),
    "a storage of a pickle": pickle.dumps(torch.ones(3), 4).replace(b"K\x03Nt", b"M\xff\xffNt"),
    "one storage many times": _one_storage_many_times(2_000),
    "many axes": opcodes(b"ctorch\nSize\n(", b"K\x01" * 100_000, b"t\x85R"),
}  # fmt: skip


@contextmanager
def memory(size: int) -> Iterator[None]:
    """No more than so many bytes can be allocated."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_no_more_than_its_file(name: str) -> None:
    begun = time.process_time()
    with memory(400 << 20):
        message = _refused(BOMBS[name])
    assert "alloc" not in message and "MemoryError" not in message
    assert time.process_time() - begun < 20  # some would take years


# ------------------------------------------------------------------------------ property tests

SMALL = {"text": torch.arange(4.0), "n": np.arange(3), "s": np.float32(1), "unused": [(1, "a")]}
VALID = [
    *(pickle.dumps(SMALL, p) for p in range(6)),
    *(saved(SMALL, **archive) for archive in ARCHIVES),
    pickle.dumps(torch.arange(4.0).bfloat16()),
]
PIECES = [
    *(bytes([code]) for code in range(256)),
    *(b"(", b")", b"]", b"}", b"t", b"R", b"b", b"\x81", b"\x94", b"h\x00", b"h\x01", b"0", b"2"),
    *(opcodes("os", "system", b"\x93")[2:-1], opcodes("echo boom")[2:-1], b"\x85R"),
    *(b"cos\nsystem\n", b"c__builtin__\neval\n", b"cbuiltins\nbytearray\n", b"c_codecs\nencode\n"),
    *(b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy._core.multiarray\n_reconstruct\n"),
    *(b"ctorch.storage\n_load_from_bytes\n", b"ctorch\nFloatStorage\n", b"ctorch\nSize\n", NAME),
    *(
        b"K\x02",
        b"J\xff\xff\xff\x7f",
        b"C\x02ab",
        b"I01\n",
        b"N",
        b"\x88",
        b"Q",
        b"\x93",
        TENSOR,
        ARRAY,
    ),
]


def _loads_or_refuses(data: bytes) -> None:
    with nothing_runs():
        try:
            value = safe_pickle.loads(data)
        except pickle.UnpicklingError as error:
            assert str(error).isprintable() and len(str(error)) < 400
            return
    _walk(value)


def _walk(value: Any) -> None:
    kinds = (type(None), bool, int, float, complex, str, bytes, bytearray, np.generic)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _walk(item)
    elif isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor
        value.contiguous()
    elif isinstance(value, np.ndarray):
        assert type(value) is np.ndarray and value.dtype.kind in "biufc"
        value.copy()
    else:
        assert isinstance(value, (*kinds, torch.dtype))


@given(st.sampled_from(VALID).flatmap(damaged))
def test_hostile_damage_to_pickles_and_archives(data: bytes) -> None:
    _loads_or_refuses(data)


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=40))
def test_hostile_opcodes(pieces: list[bytes]) -> None:
    _loads_or_refuses(opcodes(*pieces))
    _loads_or_refuses(_zip_of(opcodes(*pieces), {"0": bytes(8)}))
