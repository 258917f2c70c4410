"""Reading a sample's head and place gives what Energon's reader gives of the whole."""

import io
import os
import shutil
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import ShardInfo
from webdataset.writer import ShardWriter

from dit.data import tar_reader
from dit.data.energon.shard_reader import PlainReader
from dit.data.records import PLACE
from dit.data.tar_reader import NotPlain, OpenShards, ShardError
from dit.stored_samples import RecordHeader


def readers(root, *, shards=1, **settings):
    """Energon's reader of all samples, and ours."""
    found = sorted(root.glob("train/*.tar"))
    assert len(found) == shards
    infos = [
        ShardInfo(
            name=f"train/{p.name}",
            path=EPath(p),
            count=p.with_suffix(".tar.idx").stat().st_size // 8 - 1,
        )
        for p in found
    ]
    theirs = ShardInfosITarReader(EPath(root), infos, **settings)
    return theirs, PlainReader(theirs, OpenShards())


def same(ours, theirs):
    if theirs is None:
        return ours is None
    for name, value in theirs.items():
        mine = ours[name]
        if isinstance(mine, RecordHeader):
            assert mine.size == len(value)
            mine, value = mine.data, value[: len(mine.data)]
        assert mine == value, name
    if PLACE not in ours:
        return set(ours) == set(theirs) and not any(
            isinstance(v, RecordHeader) for v in ours.values()
        )
    whole = {name: value for name, value in theirs.items() if not name.startswith("__")}
    assert isinstance(ours.get("safetensors", b""), RecordHeader)
    assert ours[PLACE].parts() == whole
    return set(ours) == {*theirs, PLACE}


def write(path: Path, samples, tar_format=tarfile.USTAR_FORMAT, prefix=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [0]
    with tarfile.open(path, "w", format=tar_format) as tar:
        for key, parts in samples:
            for extension, data in parts.items():
                info = tarfile.TarInfo(f"{prefix}{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            ends.append(tar.offset)
    path.with_suffix(".tar.idx").write_bytes(struct.pack(f"{len(ends)}Q", *ends))


def large(shards, index):
    """One of which the head is read, and the rest later."""
    text = torch.full((2000, 8), float(index))
    return shards.ours(torch.full((2, 1, 4, 4), float(index)), text, caption=f"number {index}")


def samples(shards):
    small = shards.good(3)
    big = shards.ours(torch.randn(2, 1, 300, 300), torch.randn(40, 8), caption="long " * 4000)
    extra = small | {"txt": b"hello", "cls.json": b"{}", "safetensors": b"", "empty": b""}
    return [("a", small), ("b", big), ("c", dict(reversed(big.items()))), ("d", extra)]


@pytest.mark.parametrize("prefix", ["", "folder/", "f" * 70 + "/" + "g" * 60 + "/"])
def test_records_are_those_of_energon(shards, tmp_path, prefix):
    write(tmp_path / "train/x.tar", samples(shards), prefix=prefix)
    theirs, ours = readers(tmp_path)
    assert [PLACE in ours[i] for i in range(4)] == [False, True, True, False]  # small ones are read
    assert all(same(ours[i], theirs[i]) for i in (0, 1, 2, 3, 1, 0))


def test_parts_and_samples_that_are_filtered_out(shards, tmp_path):
    write(tmp_path / "train/x.tar", samples(shards))
    theirs, ours = readers(tmp_path, sample_filter=lambda name: name != "train/x.tar/b")
    assert ours[1] is None
    assert all(same(ours[i], theirs[i]) for i in range(4))
    theirs, ours = readers(tmp_path, part_filter=lambda part: part != "json")
    assert "json" not in ours[1]
    assert set(ours[0]) == set(theirs[0]) and set(ours[1]) == {*theirs[1], PLACE}


def test_what_is_not_plain_is_left_to_energon(shards, tmp_path):
    good = [("a", shards.good(0)), ("b", shards.good(1))]
    long = "n" * 150
    for number, (name, tar_format) in enumerate(
        [("a", tarfile.GNU_FORMAT), (long, tarfile.PAX_FORMAT), (long, tarfile.GNU_FORMAT)]
    ):
        root = tmp_path / str(number)
        write(root / "train/x.tar", [(name, good[0][1])], tar_format)
        _, ours = readers(root)
        with pytest.raises(NotPlain):
            ours[0]
    write(tmp_path / "train/x.tar", good)
    index = tmp_path / "train/x.tar.idx"
    first, second, third = struct.unpack("3Q", index.read_bytes())
    for wrong in [(first, third, third + 512), (first, second + 512, third), (first, 700, third)]:
        index.write_bytes(struct.pack("3Q", *wrong))
        _, ours = readers(tmp_path)
        with pytest.raises((NotPlain, ShardError)):
            ours[0], ours[1]


def test_only_so_many_shards_are_open(shards, tmp_path):
    for number in range(200):
        write(tmp_path / f"train/{number:03d}.tar", [(f"k{number}", large(shards, number))])
    theirs, ours = readers(tmp_path, shards=200)
    before = len(os.listdir("/proc/self/fd"))
    records = [ours[i] for i in range(200)]
    assert len(os.listdir("/proc/self/fd")) - before <= 256
    assert all(same(ours, theirs[i]) for i, ours in enumerate(records))  # opened once more
    ours.close()
    theirs.close()
    theirs.cached_offset_reader.tar_index_reader_cache.clear()
    assert len(os.listdir("/proc/self/fd")) <= before


def packs(shards, root, opened):
    config = shards.config(root, use_train_split_for_val=True)
    return [
        (pack.keys, pack.latent_TC.sum().item(), pack.text_LE.sum().item())
        for pack in shards.one_pass(config).packs
    ]


def test_remote_and_unusual_shards_give_the_same_packs(shards, tmp_path, opened, monkeypatch):
    """Shards of a store are read whole by Energon's reader, as are those with extended headers."""
    good = [large(shards, i) if i % 3 else shards.good(i) for i in range(40)]
    root = shards.write(tmp_path / "ours", good)
    expected = packs(shards, root, opened)
    for path in (root / "train").glob("*.tar"):
        first = int(path.stem[-1]) * 20
        named = [(f"{i:06d}", good[i]) for i in range(first, first + 20)]
        write(path, named, tarfile.GNU_FORMAT)
    assert packs(shards, root, opened) == expected
    shards.write(root, good)
    monkeypatch.setattr(EPath, "is_local", lambda _: False)
    assert packs(shards, root, opened) == expected


def test_shards_of_webdataset_itself(shards, tmp_path):
    """Its members have times, which ask for extended headers."""
    (tmp_path / "train").mkdir()
    with ShardWriter(str(tmp_path / "train/%06d.tar"), verbose=0) as writer:
        for i in range(3):
            writer.write({"__key__": f"k{i}", **shards.good(i)})
    path = tmp_path / "train/000000.tar"
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        ends = [*(m.offset for m in members[::2]), members[-1].offset_data + 512]
        assert members[-1].pax_headers and members[-1].size <= 512
    path.with_suffix(".tar.idx").write_bytes(struct.pack(f"{len(ends)}Q", *ends))
    theirs, ours = readers(tmp_path)
    assert all(same(ours[i], theirs[i]) for i in range(3))


def test_a_shard_that_is_gone_is_not_read_from_its_open_file(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tar_reader, "_LOOK_S", -1.0)  # it is looked for each time
    shard = tmp_path / "train/000.tar"
    write(shard, [("k", large(shards, 0))])
    _, ours = readers(tmp_path)
    place = ours[0][PLACE]
    before = {name: bytes(part) for name, part in place.parts().items()}
    away = shard.rename(tmp_path / "away.tar")
    for read in (lambda: ours[0], place.parts):
        with pytest.raises(FileNotFoundError):
            read()
    away.rename(shard)
    assert place.parts() == before
    shutil.copy(shard, away)
    away.replace(shard)  # another file of the same name is opened anew
    assert place.parts() == before
    ours.close()
