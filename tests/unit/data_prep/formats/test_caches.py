"""Caches of other tools as their own readers open them, and as faults and strangers make them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cli.parser import main
from data_prep.formats.automodel import read_automodel, relocate, write_automodel
from data_prep.formats.cached_samples import CachedSample, RefusedRecord, read_shards
from data_prep.formats.convert import records_of
from data_prep.formats.dfm import Form, read_dfm, write_dfm
from data_prep.formats.parquet import read_parquet, write_parquet
from data_prep.refusals import PrepError, Reason
from data_prep.writing.tar_shards import ShardSeries, sample_parts
from dit.data.records import read_record
from tests.hostile import damaged, json_bytes, mistaken, odd_values
from tests.pickles import Bomb, saved

WIDTH = 6  # of the text


def record(number: int, *, frames: int = 1, pooled: bool = False, size: int = 16) -> CachedSample:
    draw = torch.Generator().manual_seed(number)
    tensors = {
        "latent": torch.randn(4, frames, 2, size // 8, generator=draw).half(),
        "text": torch.randn(3 + number, WIDTH, generator=draw).bfloat16(),
    }
    if pooled:
        tensors["pooled_text"] = torch.randn(5, generator=draw).bfloat16()
    about = {"caption": f"caption {number}", "source": f"a{number}.png", "fps": None}
    about |= {"width": size, "height": 16, "original_width": 99, "original_height": 50}
    return CachedSample(key=f"key-{number}", tensors=tensors, about=about | {"num_frames": frames})


def automodel(
    folder: Path, records: list[CachedSample], *, model: str, ending: str = "meta"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_automodel(
        records, folder, ending=ending, shard_size=2, model={"model_type": model}, text_length=8
    )
    return folder


# ------------------------------------------------------------------------------ AutoModel


def opened(cache: Path, *, keys: tuple[str, ...], of_row: tuple[str, ...]) -> list[dict[str, Any]]:
    """What AutoModel's reader asks of an index and of each file, whose path it takes as it is."""
    index = json.loads((cache / "metadata.json").read_text())
    samples = []
    for shard in index["shards"]:
        for row in json.loads((cache / shard).read_text()):
            file = Path(row["cache_file"]).resolve()
            assert file.is_relative_to(cache.resolve()), "outside cache directory"
            content = torch.load(file, map_location="cpu", weights_only=True)
            sizes = torch.tensor([row["bucket_resolution"], row["original_resolution"]])
            assert sizes.dtype == torch.int64 and row["aspect_ratio"] > 0
            samples.append({key: content[key] for key in keys} | {key: row[key] for key in of_row})
    return samples


def pictures(cache: Path) -> list[dict[str, Any]]:
    keys = ("latent", "crop_offset", "prompt", "image_path", "prompt_embeds")
    found = opened(cache, keys=keys, of_row=("bucket_id",))
    assert all(torch.tensor(sample["crop_offset"]).shape == (2,) for sample in found)
    assert torch.stack([s["prompt_embeds"].squeeze(0) for s in found]).shape[1:] == (8, WIDTH)
    return found


def videos(cache: Path) -> list[dict[str, Any]]:
    found = opened(cache, keys=("video_latents", "text_embeddings"), of_row=())
    assert torch.cat([sample["text_embeddings"] for sample in found]).shape[1:] == (8, WIDTH)
    return found


@pytest.mark.parametrize("ending", ["meta", "pt"])
@pytest.mark.parametrize("model", ["flux", "pixel"])
def test_automodel_reads_pictures(
    model: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [record(0, pooled=True), record(1, pooled=True, size=24), record(2, pooled=True)]
    monkeypatch.chdir(tmp_path)
    automodel(Path("cache"), given, model=model, ending=ending)  # a relative path, as it is typed
    monkeypatch.chdir("/")
    found = pictures(tmp_path / "cache")
    assert [sample["bucket_id"] for sample in found] == [0, 1, 0]
    for sample, before in zip(found, given, strict=True):
        assert torch.equal(sample["latent"], before.tensors["latent"][:, 0])
        assert sample["prompt"] == before.about["caption"]


def test_automodel_reads_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [record(n, frames=3) for n in range(3)]
    cache = automodel(tmp_path / "cache", given, model="wan")
    monkeypatch.chdir("/")
    for sample, before in zip(videos(cache), given, strict=True):
        assert torch.equal(sample["video_latents"][0], before.tensors["latent"])


def test_two_texts_of_any_length_stack(tmp_path: Path) -> None:
    given = [record(n, frames=3) for n in range(2)]
    for n, one in enumerate(given):
        one.tensors["text_2"] = torch.ones(n, 5)
    cache = automodel(tmp_path / "cache", given, model="hunyuan")
    keys = ("text_mask", "text_embeddings_2", "text_mask_2")
    found = opened(cache, keys=keys, of_row=())
    for key in keys:
        torch.cat([sample[key] for sample in found])
    assert [int(sample["text_mask"].sum()) for sample in found] == [3, 4]
    assert [int(sample["text_mask_2"].sum()) for sample in found] == [0, 1]


def test_a_cache_that_was_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [record(n) for n in range(3)]
    cache = automodel(tmp_path / "é cache", given, model="flux")
    moved = tmp_path / "elsewhere/deeper"
    moved.parent.mkdir()
    cache.rename(moved)
    with pytest.raises(AssertionError, match="outside cache directory"):
        pictures(moved)
    assert [r.about["caption"] for r in records_in(moved)] == [f"caption {n}" for n in range(3)]
    assert main(["relocate", str(moved)]) == 0
    assert "3 samples" in capsys.readouterr().out
    assert len(pictures(moved)) == 3
    before = {path: path.read_bytes() for path in moved.glob("*.json")}
    next(moved.rglob("*.meta")).unlink()
    assert main(["relocate", str(moved)]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in moved.glob("*.json")}


def records_in(folder: Path) -> list[CachedSample]:
    found = list(records_of(folder))
    assert all(isinstance(one, CachedSample) for one in found), found
    return found  # type: ignore[return-value] # just asserted


@pytest.mark.parametrize("dump", [pickle.dumps, saved], ids=["pickle", "torch.save"])
def test_meta_files_of_either_kind(dump: Any, tmp_path: Path) -> None:
    cache = automodel(tmp_path / "cache", [record(0)], model="flux")
    (file,) = cache.rglob("*.meta")
    content = torch.load(file)
    extra = {"clip": np.ones(3), "tokens": [1, 2], "scale": np.float32(2), "shape": torch.Size([1])}
    file.write_bytes(dump({**content, **extra, "latent": content["latent"].numpy()}))
    (found,) = records_in(cache)
    assert torch.equal(found.tensors["latent"], record(0).tensors["latent"])


def test_refusals_of_a_cache_name_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = automodel(tmp_path / "cache", [record(n) for n in range(6)], model="flux")
    rows = [json.loads(path.read_text()) for path in sorted(cache.glob("metadata_shard_*"))]
    files = [Path(row["cache_file"]) for two in rows for row in two]
    files[0].write_bytes(saved({"latent": torch.ones(4, 2, 2), "unused": Bomb()}))
    os.truncate(files[1], 500)
    (cache / "metadata_shard_0002.json").write_bytes(b"[" * 100_000)
    words = ["convert", str(cache), "--output_dir", str(tmp_path / "out"), "--split", "1,0,0"]
    with nothing_of_the_system_runs():
        assert main([*words, "--max_bad_fraction", "0.8"]) == 0
    assert "refused: 3 x file cannot be read" in capsys.readouterr().out
    refused = [json.loads(x) for x in (tmp_path / "out/refused.jsonl").read_text().splitlines()]
    by_source = {line["source"]: line["detail"] for line in refused}
    named = ["/".join(file.parts[-2:]) for file in files[:2]]
    assert set(by_source) == {*named, "metadata_shard_0002.json"}
    assert "posix.system" in by_source[named[0]]
    assert not any("weights_only" in detail for detail in by_source.values())
    card = json.loads((tmp_path / "out/dataset_card.json").read_text())
    assert card["splits"]["train"]["samples"] == 2


class nothing_of_the_system_runs:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None:
        self.system, os.system = os.system, self._fail

    def __exit__(self, *_: object) -> None:
        os.system = self.system

    def _fail(self, *_: object) -> int:
        raise AssertionError("a payload ran")


INDEXES = {
    "nested": b"[" * 100_000,
    "a number": b"5",
    "null": b"null",
    "no JSON": b"{",
    "no UTF-8": b'{"shards": ["\xff"]}',
    "empty": b"",
    "a text": b'{"shards": "metadata_shard_0000.json"}',
    "numbers": b'{"shards": [1]}',
    "a path": b'{"shards": ["../metadata_shard_0000.json"]}',
    "a NUL": b'{"shards": ["a\\u0000b"]}',
    "objects": b'{"shards": [{}]}',
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_malformed_index_is_named_before_anything_is_removed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = automodel(tmp_path / "cache", [record(0)], model="flux")
    words = ["--output_dir", str(tmp_path / "out"), "--split", "1,0,0"]
    assert main(["convert", str(cache), *words]) == 0
    (cache / "metadata.json").write_bytes(INDEXES[name])
    assert main(["convert", str(cache), *words, "--overwrite"]) == 1
    said = capsys.readouterr().err
    assert "metadata.json" in said.replace("\n", "") and "Traceback" not in said
    assert list((tmp_path / "out").rglob("*.tar"))


def test_an_index_never_leads_out_of_its_cache(tmp_path: Path) -> None:
    cache = automodel(tmp_path / "cache", [record(0)], model="flux")
    outside = tmp_path / "x.meta"
    (file,) = cache.rglob("*.meta")
    shutil.copy(file, outside)
    os.mkfifo(cache / "pipe.meta")
    (rows,) = cache.glob("metadata_shard_*.json")
    (row,) = json.loads(rows.read_text())
    odd = [str(outside), "../x.meta", "/dev/zero", "pipe.meta", "a\0b", "", 5, None, "x" * 5000]
    rows.write_text(json.dumps([{**row, "cache_file": path} for path in odd]))
    found = list(read_automodel(cache))
    assert len(found) == len(odd)
    assert all(isinstance(one, RefusedRecord) for one in found)


# ------------------------------------------------------------------------------ DFM


def parts_of(tar: Path) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as archive:
        for member in archive:
            key, _, part = member.name.partition(".")
            content = archive.extractfile(member)
            assert content is not None
            found.setdefault(key, {})[part] = content.read()
    return found


@pytest.mark.parametrize("form", Form)
def test_training_reads_what_was_written_for_dfm(form: Form, tmp_path: Path) -> None:
    given = [record(n, pooled=form is Form.FLUX) for n in range(2)]
    write_dfm(given, tmp_path, shard_size=10, form=form)
    (tar,) = (tmp_path / "dfm_shards").glob("*.tar")
    for key, parts in parts_of(tar).items():
        ours, before = read_record(parts), given[int(key[-1])].tensors
        rounded = before["latent"].bfloat16() if form is Form.DIT else before["latent"]
        assert torch.equal(ours.latent_CFHW.float(), rounded.float())
        assert ours.text_LE is not None and torch.equal(ours.text_LE.bfloat16(), before["text"])
    for found, before in zip(records_in(tmp_path), given, strict=True):
        assert found.key == before.key and set(found.tensors) == set(before.tensors)


def test_a_part_of_a_tensor_does_not_bring_the_whole(tmp_path: Path) -> None:
    one = record(0)
    whole = torch.zeros(1000, WIDTH)
    one.tensors["text"] = whole[:3].bfloat16()
    one.tensors["latent"] = torch.zeros(4, 500, 2, 2).half()[:, :1]
    write_dfm([one], tmp_path, shard_size=10, form=Form.WAN)
    (parts,) = parts_of(next(tmp_path.rglob("*.tar"))).values()
    assert len(parts["pth"]) < 5000 and len(parts["pickle"]) < 4 * 226 * WIDTH + 1000


def dfm_tar(path: Path, samples: list[dict[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, parts in enumerate(samples):
            for part, content in parts.items():
                member = tarfile.TarInfo(f"{number:06d}.{part}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


LATENT = torch.ones(1, 4, 1, 2, 2)
TEXT = torch.cat([torch.ones(1, 3, WIDTH), torch.zeros(1, 5, WIDTH)], dim=1)


@pytest.mark.parametrize("protocol", range(6))
def test_shards_as_dfm_writes_them(protocol: int, tmp_path: Path) -> None:
    """A plain pickle of a tensor, an array or a dict; training reads them all alike."""
    texts = [
        TEXT.bfloat16(),
        TEXT.half(),
        TEXT.numpy(),
        {"prompt_embeds": TEXT[0], "pooled_prompt_embeds": torch.ones(5), "n": np.float32(1)},
        {"t5_embeds": np.asfortranarray(TEXT[0].numpy()), "clip_embeds": np.ones(5, np.float32)},
    ]
    latents = [LATENT.bfloat16(), LATENT[0].half(), LATENT[0, :, 0], LATENT, LATENT[0, :, 0]]
    samples = [
        {"pth": saved(latent), "pickle": pickle.dumps(text, protocol), "json": b"{}"}
        for latent, text in zip(latents, texts, strict=True)
    ]
    dfm_tar(tmp_path / "in/a.tar", samples)
    found = records_in(tmp_path / "in")
    assert len(found) == len(samples)
    for one, parts in zip(found, samples, strict=True):
        assert one.tensors["latent"].shape == (4, 1, 2, 2)
        assert torch.equal(one.tensors["text"].float(), TEXT[0, :3])
        trained = read_record(parts)
        assert torch.equal(trained.latent_CFHW, one.tensors["latent"])
        assert trained.text_LE is not None and torch.equal(trained.text_LE, one.tensors["text"])


def test_one_damaged_tar_costs_no_other(tmp_path: Path) -> None:
    sample = {"pth": saved(LATENT), "pickle": pickle.dumps(TEXT), "json": b"{}"}
    good = dfm_tar(tmp_path / "c.tar", [sample] * 3).read_bytes()
    size = len(good.rstrip(b"\0")) // 512 * 512
    (tmp_path / "a.tar").write_bytes(good[: size // 2])
    (tmp_path / "b.tar").write_bytes(b"\x1f\x8b" + good)
    second = good.index(b"000001.pth")
    (tmp_path / "d.tar").write_bytes(good[:second] + b"\xff" * 512 + good[second + 512 :])
    with tarfile.open(tmp_path / "e.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        first = tarfile.TarInfo("000000.pth")
        first.pax_headers = {"GNU.sparse.map": "1,x", "GNU.sparse.size": "9"}
        tar.addfile(first)
    found = list(read_dfm(tmp_path))
    refused = {one.source for one in found if isinstance(one, RefusedRecord)}
    assert {"a.tar", "b.tar", "d.tar", "e.tar"} <= refused
    assert sum(isinstance(one, CachedSample) for one in found) == 3 + 1 + 1


def test_members_that_are_no_plain_files(tmp_path: Path) -> None:
    sample = {"pth": saved(LATENT), "pickle": pickle.dumps(TEXT), "json": b"{}"}
    path = dfm_tar(tmp_path / "a.tar", [sample])
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo("000001.pth")
            member.type, member.linkname = kind, "000001.pth"
            tar.addfile(member)
    sparse = tarfile.TarInfo("000002.pth")
    sparse.type, sparse.size = tarfile.GNUTYPE_SPARSE, 0
    block = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    block[386:398], block[398:410] = b"00000000000\0", b"00000000000\0"
    block[483:495] = b"\x80" + (32 << 40).to_bytes(11, "big")  # its true size: 32 TB
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    data = path.read_bytes().rstrip(b"\0")
    data += bytes(-len(data) % 512) + bytes(block)
    path.write_bytes(data + dfm_tar(tmp_path / "last", [sample]).read_bytes())
    found = list(read_dfm(tmp_path))
    assert [isinstance(one, CachedSample) for one in found] == [True, False, False, True]


# ------------------------------------------------------------------------------ property tests


def kinds(found: Iterator[CachedSample | RefusedRecord]) -> list[CachedSample | RefusedRecord]:
    """All that comes; each refusal has a file, a reason and a detail, and can be written."""
    all_of_them = list(found)
    for one in all_of_them:
        if isinstance(one, RefusedRecord):
            assert one.source and isinstance(one.reason, Reason) and one.detail
            json.dumps([one.source, one.detail])
        else:
            assert one.tensors["latent"].dim() == 4 and one.tensors["text"].dim() == 2
            json.dumps(one.about, allow_nan=False).encode()
            sample_parts(one.tensors, one.about)
            assert one.key.isascii() and "/" not in one.key and "." not in one.key
    return all_of_them


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of rows, of two samples and one."""
    folder = tmp_path_factory.mktemp("hostile") / "cache"
    return automodel(folder, [record(n) for n in range(3)], model="flux")


INDEX = {"shards": ["metadata_shard_0000.json", "metadata_shard_0001.json"], "total_items": 3}


@given(content=json_bytes(INDEX))
def test_hostile_metadata(cache: Path, content: bytes) -> None:
    before = (cache / "metadata.json").read_bytes()
    (cache / "metadata.json").write_bytes(content)
    try:
        kinds(read_automodel(cache))
    except PrepError as error:
        assert "metadata.json" in str(error)
    finally:
        (cache / "metadata.json").write_bytes(before)


@given(data=st.data())
def test_hostile_rows_of_an_index(cache: Path, data: st.DataObject) -> None:
    path = cache / "metadata_shard_0000.json"
    before = path.read_bytes()
    path.write_bytes(data.draw(json_bytes(json.loads(before))))
    try:
        found = kinds(read_automodel(cache))
        assert isinstance(found[-1], CachedSample), "the sample of the other file is lost"
    finally:
        path.write_bytes(before)


CONTENT = {"latent": [[[1.0] * 2] * 2] * 4, "prompt_embeds": [[[1.0] * WIDTH] * 3], "fps": 24}


@given(content=mistaken(CONTENT), archive=st.booleans(), data=st.data())
def test_hostile_files_of_a_cache(
    cache: Path, content: Any, archive: bool, data: st.DataObject
) -> None:
    if isinstance(content, dict):
        content = {
            key: torch.tensor(value) if is_numbers(value) else value
            for key, value in content.items()
        }
    row = json.loads((cache / "metadata_shard_0000.json").read_text())[0]
    path = Path(row["cache_file"])
    before = path.read_bytes()
    dumped = saved(content) if archive else pickle.dumps(content)
    path.write_bytes(data.draw(st.just(dumped) | damaged(dumped)))
    try:
        found = kinds(read_automodel(cache))
        assert all(isinstance(one, CachedSample) for one in found[1:]), found
    finally:
        path.write_bytes(before)


def is_numbers(value: Any) -> bool:
    try:
        return isinstance(value, list) and torch.tensor(value) is not None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


SAMPLE = {"pth": saved(LATENT), "pickle": pickle.dumps(TEXT), "json": b'{"caption": "a", "fps": 2}'}


@given(data=st.data())
def test_hostile_shards_of_dfm(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile_dfm"
    if not folder.exists():
        dfm_tar(folder / "z.tar", [SAMPLE])
        dfm_tar(folder / "valid", [SAMPLE] * 2)
    parts = {
        "pth": data.draw(st.just(SAMPLE["pth"]) | damaged(SAMPLE["pth"])),
        "pickle": data.draw(st.just(SAMPLE["pickle"]) | damaged(SAMPLE["pickle"])),
        "json": data.draw(json_bytes({"caption": "a", "fps": 2, "num_frames": 1})),
    }
    if data.draw(st.booleans()):
        dfm_tar(folder / "a.tar", [parts, SAMPLE])
        found = kinds(read_dfm(folder))
        assert len(found) == 3 and isinstance(found[1], CachedSample)
    else:
        (folder / "a.tar").write_bytes(data.draw(damaged((folder / "valid").read_bytes())))
        found = kinds(read_dfm(folder))
    assert isinstance(found[-1], CachedSample), "the sample of the other tar is lost"


@given(data=st.data())
def test_hostile_parquet(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile_parquet"
    good = folder / "combined_parquet_dataset/data_chunk_0.parquet"
    if not folder.exists():
        folder.mkdir()
        write_parquet([record(n) for n in range(2)], folder, rows_in_file=8)
    (row, _) = pyarrow.parquet.read_table(good).to_pylist()
    odd = good.parent / "a.parquet"
    if data.draw(st.booleans()):
        odd.write_bytes(data.draw(damaged(good.read_bytes())))
    else:
        row[data.draw(st.sampled_from(sorted(row)))] = data.draw(
            odd_values | st.binary(max_size=64)
        )
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), odd)
        except (pyarrow.ArrowException, OverflowError, ValueError, TypeError):
            return  # no Parquet holds it
    found = kinds(read_parquet(folder))
    assert all(isinstance(one, CachedSample) for one in found[-2:]), (
        "the samples of the other are lost"
    )


@given(data=st.data())
def test_hostile_shards_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile_ours"
    info, shard = folder / ".nv-meta/.info.json", folder / "train/shard-000000.tar"
    counts = {"shard_counts": {"train/shard-000000.tar": 2}}
    if not folder.exists():
        info.parent.mkdir(parents=True)
        with ShardSeries(folder / "train", max_samples=9, max_bytes=2**30) as series:
            for one in (record(0), record(1)):
                series.write(one.key, sample_parts(one.tensors, one.about))
        shutil.copy(shard, folder / "valid")
    valid = (folder / "valid").read_bytes()
    shard.write_bytes(data.draw(st.just(valid) | damaged(valid)))
    info.write_bytes(data.draw(st.just(json.dumps(counts).encode()) | json_bytes(counts)))
    try:
        kinds(read_shards(folder))
    except PrepError as error:
        assert str(folder) in str(error)


@pytest.mark.parametrize(
    ("rows", "said"), [('[{"cache_file": 5}]', "cache_file=5"), ("[5]", "the index holds a int")]
)
def test_relocate_refuses_an_odd_index(cache: Path, rows: str, said: str) -> None:
    path = cache / "metadata_shard_0000.json"
    before = path.read_bytes()
    path.write_text(rows)
    try:
        with pytest.raises(
            PrepError, match=rf"metadata_shard_0000\.json cannot be corrected: {said}"
        ):
            relocate(cache)
    finally:
        path.write_bytes(before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["metadata_shard_0000.json", "x.parquet", "x.tar"])
def test_a_pipe_in_a_cache_is_refused(name: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    if name.endswith(".json"):
        (cache / "metadata.json").write_text(json.dumps({"shards": [name]}))
    os.mkfifo(cache / name)
    (refused,) = records_of(cache)
    assert isinstance(refused, RefusedRecord) and refused.source == name


def test_a_pipe_is_no_index(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metadata.json")
    with pytest.raises(PrepError, match=r"metadata\.json cannot be read"):
        read_automodel(tmp_path)


def test_a_cache_is_never_replaced_by_its_own_conversion(tmp_path: Path, capsys) -> None:
    cache = automodel(tmp_path / "cache", [record(n) for n in range(3)], model="flux")
    before = sorted(cache.rglob("*"))
    for extra in ([], ["--overwrite"]):
        assert main(["convert", str(cache), "--output_dir", str(cache), *extra]) == 1
        assert "give another output folder" in " ".join(capsys.readouterr().err.split())
        assert sorted(cache.rglob("*")) == before
