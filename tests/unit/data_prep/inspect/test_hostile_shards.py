"""Inspection reports what is wrong with a shard or its lists, whatever their bytes are."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.inspect.read_shards import inspect_shard, shard_counts
from data_prep.refusals import PrepError
from dit.codecs.dataset_card import CodecError, read_card
from tests.hostile import damaged, json_bytes, mistaken


@pytest.fixture(scope="module")
def shard():
    """Bytes of a shard with two samples, and its offsets."""
    buffer, offsets = io.BytesIO(), [0]
    tensors = {"latent": torch.zeros(2, 1, 2, 2).half(), "text": torch.ones(2, 4).bfloat16()}
    payload = safetensors.torch.save(tensors)
    about = {"crc32": {"safetensors": f"{zlib.crc32(payload):08x}"}}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key in "ab":
            for part, data in {"safetensors": payload, "json": json.dumps(about).encode()}.items():
                info = tarfile.TarInfo(f"{key}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            offsets.append(tar.offset)
    return buffer.getvalue(), struct.pack(f"<{len(offsets)}Q", *offsets)


@given(data=st.data(), in_index=st.booleans())
def test_hostile_shards_are_reported(tmp_path, shard, data, in_index):
    content, index = shard
    if in_index:
        index = data.draw(damaged(index) | st.binary(max_size=40))
    else:
        content = data.draw(damaged(content))
    (tmp_path / "x.tar").write_bytes(content)
    (tmp_path / "x.tar.idx").write_bytes(index)
    report = inspect_shard(tmp_path, "x.tar", expected=2)
    assert report.samples == 2 or report.problems
    assert all(problem.startswith("x.tar") for problem in report.problems)


@pytest.mark.parametrize("kind", [b"S", b"x", b"L"])
def test_a_member_of_terabytes_is_reported(tmp_path, shard, kind):
    content = bytearray(shard[0])
    content[156:157], content[124:136] = kind, b"\x80" + b"\x00" * 4 + b"\x7f" + b"\x00" * 6
    content[483:495] = content[124:136]  # what a sparse member says of its real size
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    (tmp_path / "x.tar").write_bytes(bytes(content))
    (tmp_path / "x.tar.idx").write_bytes(shard[1])
    assert inspect_shard(tmp_path, "x.tar", expected=2).problems


INFO = {"shard_counts": {"train/x.tar": 2}}


@given(content=json_bytes(INFO) | mistaken(INFO).map(json.dumps).map(str.encode))
def test_hostile_lists_of_shards_and_cards(tmp_path, content):
    (tmp_path / ".nv-meta").mkdir(exist_ok=True)
    for path, read in (
        (tmp_path / ".nv-meta/.info.json", shard_counts),
        (tmp_path / "dataset_card.json", read_card),
    ):
        path.write_bytes(content)
        try:
            assert isinstance(read(tmp_path), dict)
        except (PrepError, CodecError) as error:
            assert str(path) in str(error)
