"""Whatever the bytes of a dataset are: a refusal of that sample, or an error that names a file."""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
from contextlib import suppress

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import ShardInfo

from dit.data import DataError, check_data
from dit.data.cook import Expected, cook, measure_sample
from dit.data.energon.shard_reader import SafeReader, read_parts, read_whole
from dit.data.records import PLACE, UNREADABLE, _in_place, read_record
from dit.data.rejections import SampleRefused
from dit.data.tar_reader import OpenShards
from tests.hostile import damaged, json_bytes, mistaken, odd_values

COUNT = 3
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


@pytest.fixture(scope="module")
def tars(shards):
    """By format of the tar: its bytes and the offsets of its samples, of which one is large."""
    found = {}
    for form in FORMATS:
        buffer, offsets = io.BytesIO(), [0]
        with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
            for index in range(COUNT):
                for part, data in _sample(shards, index).items():
                    # The long name has extended headers in all but the first format.
                    long = "n" * 120 if form != tarfile.USTAR_FORMAT and index == 2 else ""
                    info = tarfile.TarInfo(f"k{index}{long}.{part}")
                    info.size, info.mtime = len(data), 1.5 if form == tarfile.PAX_FORMAT else 0
                    tar.addfile(info, io.BytesIO(data))
                offsets.append(tar.offset)
        found[form] = buffer.getvalue(), offsets
    return found


def _sample(shards, index):
    text = torch.full((600 if index == 1 else 2, 8), float(index)).bfloat16()
    return shards.ours(torch.full((2, 1, 4, 4), float(index)), text, caption=f"number {index}")


def _reader(root, content, offsets, count=COUNT):
    (root / "train").mkdir(exist_ok=True)
    (root / "train/x.tar").write_bytes(content)
    (root / "train/x.tar.idx").write_bytes(offsets)
    info = ShardInfo(name="train/x.tar", path=EPath(root / "train/x.tar"), count=count)
    return SafeReader(ShardInfosITarReader(EPath(root), [info]), OpenShards())


def _packed(*offsets):
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def _read(reader, index, expected):
    """The number in the latent of a sample, None for a refused one; and whether sums were there."""
    record = reader[index]
    record["__key__"].encode()
    if UNREADABLE in record:
        assert record[UNREADABLE]
        return None
    try:
        measured = measure_sample(record, expected)
        parts = read_parts(record[PLACE]) if PLACE in record else record
        if UNREADABLE in parts:
            return None
        sample = cook(parts, expected, key=record["__key__"])
    except SampleRefused as refusal:
        assert str(refusal.detail)
        return None
    assert measured is None or measured.shape[1] == len(sample.text_LE)
    if b'"crc32": {"safetensors"' not in bytes(parts["json"]):
        return None  # it asks for no check
    assert len(sample.latent_CFHW.unique()) == len(sample.text_LE.unique()) == 1
    assert sample.latent_CFHW.flatten()[0] == sample.text_LE.flatten()[0]
    return float(sample.latent_CFHW.flatten()[0])


@given(data=st.data(), form=st.sampled_from(FORMATS))
def test_hostile_tars(shards, tmp_path, tars, data, form):
    content, offsets = tars[form]
    reader = _reader(tmp_path, data.draw(damaged(content)), _packed(*offsets))
    expected = Expected.of(shards.config())
    for index in range(COUNT):
        assert _read(reader, index, expected) in (None, 0, 1, 2)


@given(data=st.data(), form=st.sampled_from(FORMATS), which=st.integers(0, COUNT - 1))
def test_hostile_samples_leave_their_neighbours_alone(shards, tmp_path, tars, data, form, which):
    content, offsets = tars[form]
    start, stop = offsets[which : which + 2]
    own = data.draw(damaged(content[start:stop]))[: stop - start].ljust(stop - start, b"\0")
    reader = _reader(tmp_path, content[:start] + own + content[stop:], _packed(*offsets))
    expected = Expected.of(shards.config())
    for index in range(COUNT):
        found = _read(reader, index, expected)
        assert found == index or (index == which and found is None)


_FIELDS = {"size": (124, 12), "kind": (156, 1), "name": (0, 100), "magic": (257, 8)}
_NUMBERS = (b"-0000001000", b"77777777777", b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"0", b" 7_7 ")
_KINDS = (b"S", b"L", b"K", b"x", b"g", b"5", b"1", b"2", b"V", b"")
_PARTS = (b"a.__key__", b"a.__sources__", b"a.__place__", b"a.__unreadable__", b"\xff\xfe.json")
_NAMES = (*_PARTS, b"a\nb.json", b".", b"a/")
_ODD_FIELDS = st.sampled_from([*_NUMBERS, *_KINDS, *_NAMES])


@given(data=st.data(), form=st.sampled_from(FORMATS))
def test_hostile_tar_headers_with_right_checksums(shards, tmp_path, tars, data, form):
    content, offsets = bytearray(tars[form][0]), tars[form][1]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(offsets[:-1]))
        at += 512 * data.draw(st.integers(0, 2))
        field, size = _FIELDS[data.draw(st.sampled_from(sorted(_FIELDS)))]
        content[at + field : at + field + size] = data.draw(_ODD_FIELDS)[:size].ljust(size, b"\0")
        content[at + 148 : at + 156] = b" " * 8
        total = sum(content[at : at + 512])
        content[at + 148 : at + 156] = b"%06o\0 " % total
    reader = _reader(tmp_path, bytes(content), _packed(*offsets))
    expected = Expected.of(shards.config())
    for index in range(COUNT):
        assert _read(reader, index, expected) in (None, index)


def _with_header(content, at, **fields):
    """With other fields in the header at `at`, and its checksum right."""
    changed = bytearray(content)
    for name, value in fields.items():
        field, size = _FIELDS[name]
        changed[at + field : at + field + size] = value[:size].ljust(size, b"\0")
    changed[at + 148 : at + 156] = b" " * 8
    changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])
    return bytes(changed)


@pytest.mark.timeout(60)  # the one below zero would lead back to its own header for ever
@pytest.mark.parametrize(
    "fields",
    [
        {"size": b"-0000001000"},
        {"size": b"\x80" + b"\x7f" * 11},
        {"size": b"\x80" + b"\x7f" * 11, "kind": b"S"},
        {"size": b"\x80" + b"\x7f" * 11, "kind": b"L"},
        {"size": b"77777777777", "kind": b"x"},
        *({"name": name} for name in _PARTS[:4]),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_a_header_that_asks_for_too_much(shards, tmp_path, tars, form, fields):
    content, offsets = tars[form]
    reader = _reader(tmp_path, _with_header(content, 0, **fields), _packed(*offsets))
    expected = Expected.of(shards.config())
    first, *others = [_read(reader, index, expected) for index in range(COUNT)]
    assert others == [1, 2]
    assert first in ((None, 0) if form == tarfile.PAX_FORMAT else (None,))  # its name comes before


def test_a_sparse_member_is_not_filled_with_zeros(tmp_path, tars):
    content, offsets = tars[tarfile.USTAR_FORMAT]
    content = bytearray(_with_header(content, 0, kind=b"S"))
    content[483:495] = b"77777777777\0"  # the size that it says it has: 8 GiB
    reader = _reader(tmp_path, _with_header(content, 0), _packed(*offsets))
    with pytest.raises(tarfile.ReadError, match="sparse"):
        read_whole(reader._reader, 0)


@pytest.mark.parametrize("again", [(0, 1, 2, 0, 1, 2), (0, 1, 0, 1, 2, 3), (0, 0, 1, 1, 2, 3)])
def test_an_index_gives_no_sample_twice(tmp_path, tars, again):
    content, offsets = tars[tarfile.USTAR_FORMAT]
    reader = _reader(tmp_path, content, _packed(*(offsets[i] for i in again)), count=5)
    for index in range(5):
        said = reader[index][UNREADABLE]
        assert f"{tmp_path}/train/x.tar.idx is damaged" in said


@given(data=st.data())
def test_hostile_tar_indices(shards, tmp_path, tars, data):
    content, offsets = tars[tarfile.USTAR_FORMAT]
    numbers = st.sampled_from([*offsets, 512, 1024, 700, len(content), 2**40, 2**63, 2**64 - 1])
    good = _packed(*offsets)
    index = data.draw(
        damaged(good) | st.lists(numbers, max_size=6).map(lambda n: _packed(*n)) | st.binary()
    )
    reader = _reader(tmp_path, content, index)
    expected = Expected.of(shards.config())
    for at in range(COUNT):
        assert _read(reader, at, expected) in (None, 0, 1, 2)


HEAD = {
    "__metadata__": {"format": "pt"},
    "latent": {"dtype": "F16", "shape": [2, 1, 4, 4], "data_offsets": [0, 64]},
    "text": {"dtype": "BF16", "shape": [2, 8], "data_offsets": [64, 96]},
}


@given(head=json_bytes(HEAD) | mistaken(HEAD).map(json.dumps).map(str.encode), body=st.data())
def test_hostile_safetensors_heads(shards, head, body):
    payload = struct.pack("<Q", len(head)) + head + b"\x3c" * 96
    if body.draw(st.booleans()):
        payload = body.draw(damaged(payload))
    try:
        theirs = safetensors.torch.load(payload)
    except Exception:  # noqa: BLE001 - of many kinds: it is the judge of what is sound
        theirs = None
    ours = None
    with suppress(RuntimeError, TypeError, ValueError):
        ours = _in_place(memoryview(bytearray(payload)))
    if ours is not None:
        assert theirs is not None
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape
            assert (
                tensor.flatten().view(torch.int16).equal(theirs[name].flatten().view(torch.int16))
            )
    for form in (payload, memoryview(bytearray(payload))):
        with suppress(SampleRefused):
            record = read_record({"safetensors": form, "json": b"{}"})
            assert theirs is not None and record.latent_CFHW.numel() == theirs["latent"].numel()


ABOUT = {
    "format_version": 1,
    "caption": "a red square",
    "fps": 24.0,
    "crc32": {"safetensors": "00000000"},
    "height": 8,
}


@given(about=json_bytes(ABOUT) | mistaken(ABOUT).map(json.dumps).map(str.encode))
def test_hostile_json_of_samples(shards, about):
    parts = shards.good(0)
    try:
        record = read_record({**parts, "json": about})
    except SampleRefused as refusal:
        assert refusal.detail
    else:
        record.caption.encode()
        assert record.fps != record.fps or 0 < record.fps < float("inf")


SMALL_FILES = {
    ".nv-meta/.info.json": {
        "energon_version": "7.4.1",
        "shard_counts": {"train/shard-000000.tar": 4, "val/shard-000000.tar": 2},
    },
    ".nv-meta/split.yaml": {
        "split_parts": {"train": ["train/shard-00000{0..0}.tar"], "val": ["val/shard-000000.tar"]},
        "exclude": [],
    },
    ".nv-meta/dataset.yaml": {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"},
    "dataset_card.json": {
        "format_version": 1,
        "text_encoder": {"name": "bytes", "width": 8},
        "latent": {"channels": 2, "stride": 2, "temporal_stride": 1},
        "splits": {"train": {"samples": 4, "shards": 1}},
        "sizes": [{"num_frames": 1, "height": 8, "width": 8, "samples": 4}],
    },
}


@pytest.fixture(scope="module")
def folder(shards, tmp_path_factory):
    root = tmp_path_factory.mktemp("small_files") / "set"
    shards.good_set(root, 4)
    shards.good_set(root, 2, split="val", first=4)
    for name, document in SMALL_FILES.items():
        (root / name).write_text(json.dumps(document))
    return root


@given(data=st.data(), name=st.sampled_from(sorted(SMALL_FILES)))
def test_hostile_small_files_of_a_dataset(shards, folder, data, name):
    document = SMALL_FILES[name]
    odd = mistaken(document).map(lambda d: json.dumps(d).encode())
    content = data.draw(json_bytes(document) | odd | odd_values.map(str).map(_utf8))
    kept = (folder / name).read_bytes()
    (folder / name).write_bytes(content)
    try:
        check_data(shards.config(folder))
    except DataError as error:
        assert str(folder) in str(error)
    finally:
        (folder / name).write_bytes(kept)


def _utf8(text):
    return text.encode(errors="surrogatepass")


@pytest.mark.parametrize("yaml", ["&a [*a]", "{a: &a [1], b: *a", "a: [" * 3000, "\x00", "- "])
@pytest.mark.parametrize("name", [".nv-meta/split.yaml", ".nv-meta/dataset.yaml"])
def test_yaml_that_is_odd(shards, tmp_path, folder, name, yaml):
    shutil.copytree(folder, tmp_path / "set")
    (tmp_path / "set" / name).write_text(yaml)
    with pytest.raises(DataError, match=str(tmp_path)):
        check_data(shards.config(tmp_path / "set"))


def test_a_pattern_of_too_many_names(shards, tmp_path, folder):
    shutil.copytree(folder, tmp_path / "set")
    split = tmp_path / "set/.nv-meta/split.yaml"
    split.write_text(split.read_text().replace("{0..0}", "{0..9999999999}"))
    with pytest.raises(DataError, match=r"split.yaml has the pattern .* names; correct its bounds"):
        check_data(shards.config(tmp_path / "set"))
