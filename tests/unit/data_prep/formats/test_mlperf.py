"""Shards of MLPerf's FLUX.1, as NVIDIA's converter writes them: trained as they are, or converted.

Rows of text and channels are few here; all else is as in the benchmark.
"""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_prep.cli.parser import main
from data_prep.formats.cached_samples import CachedSample, read_shards
from data_prep.formats.export import export
from data_prep.formats.parquet import read_parquet
from data_prep.inspect.read_shards import inspect_shard, shard_counts
from dit import stored_samples
from dit.batch import FixedLevels, LatentVariance
from dit.config import RunConfig
from dit.config_loading import load_config
from dit.data import DataError, build_train_loader, check_data, null_inputs, validation_groups
from dit.data.cook import Expected, cook, measure_sample
from dit.data.pack import SampleSize
from dit.data.rejections import Reject, SampleRefused
from dit.models.family import InputKind, SampleInput
from dit.models.positions import unpack_latents
from recipes.runs import dit_debug

CHANNELS, ROWS, WIDTH, POOLED, SIDE = 2, 3, 8, 5, 4
SHAPES = {
    "t5": (ROWS, WIDTH),
    "clip": (POOLED,),
    "mean": (CHANNELS, SIDE, SIDE),
    "logvar": (CHANNELS, SIDE, SIDE),
}
OVERRIDES = (
    *("model.crossattn_emb_size=8", "model.pooled_size=5", "model.in_channels=2"),
    "model.text_pad_to=stored",
)
"""Overrides of conf/flux_debug.yaml for the sizes of these samples."""
Parts = dict[str, bytes]


def bits(values: Tensor, *, plain: bool = False) -> bytes:
    """bfloat16 as an array of uint16, with or without a header of NumPy."""
    array = values.bfloat16().view(torch.uint16).numpy()
    stream = io.BytesIO()
    np.save(stream, array)
    return array.tobytes() if plain else stream.getvalue()


def tensors_of(number: int, side: int = SIDE) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    shapes = SHAPES | dict.fromkeys(("mean", "logvar"), (CHANNELS, side, side))
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {name: value.bfloat16() for name, value in found.items()}


def parts_of(number: int, *, plain: bool = False, side: int = SIDE, **about: Any) -> Parts:
    found = {f"{n}.bytes": bits(v, plain=plain) for n, v in tensors_of(number, side).items()}
    return {"json": json.dumps({"key": f"cc-{number}"} | about).encode(), **found}


def write(folder: Path, samples: list[Parts], per_shard: int = 6) -> None:
    """`shard_000000.tar`, ... and index.txt."""
    folder.mkdir(parents=True)
    names = []
    for first in range(0, len(samples), per_shard):
        names.append(f"shard_{len(names):06d}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for number, parts in enumerate(samples[first : first + per_shard], start=first):
                for part, content in parts.items():
                    member = tarfile.TarInfo(f"{number:08d}.{part}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    (folder / "index.txt").write_text("".join(f"{name}\n" for name in names))


def null_texts() -> dict[str, Tensor]:
    return {"t5": torch.full((1, ROWS, WIDTH), 0.3), "clip": torch.full((1, POOLED), 0.7)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths of the benchmark, for parts that do not say theirs."""
    widths = (WIDTH, POOLED, CHANNELS, CHANNELS)
    small = {
        name: one._replace(width=width)
        for (name, one), width in zip(stored_samples.MLPERF.items(), widths, strict=True)
    }
    monkeypatch.setattr(stored_samples, "MLPERF", small)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with train, val and the null texts."""
    folder = tmp_path / "cc12m"
    write(
        folder / "train", [parts_of(n, plain=n % 2 == 1, side=4 + 60 * (n == 0)) for n in range(8)]
    )
    write(folder / "val", [parts_of(100 + n, timestep=n % 8) for n in range(16)], per_shard=7)
    (folder / "empty_encodings").mkdir()
    for name, value in null_texts().items():
        np.save(folder / "empty_encodings" / f"{name}_empty.npy", value.numpy())
    return folder


def config(path: Path, **data: Any) -> RunConfig:
    told = {"mock": "false", "path": str(path), "task_encoder_seq_length": 1200} | data
    return load_config(
        dit_debug(),
        config_file=Path("conf/flux_debug.yaml"),
        overrides=[
            *(*OVERRIDES, "train.global_batch_size=1"),
            *(f"dataset.{name}={value}" for name, value in told.items()),
        ],
    )


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def convert(folder: Path, out: Path, *options: str) -> int:
    return main(["convert", str(folder), "--output_dir", str(out), *options])


def normalised(number: int) -> tuple[Tensor, Tensor]:
    given = tensors_of(number)
    mean = (given["mean"].float() - 0.1159) * 0.3611
    return mean[:, None], (given["logvar"].float() + 2 * math.log(0.3611))[:, None]


def test_linked_shards_train_as_they_are(theirs: Path, tmp_path: Path) -> None:
    before = files_in(theirs)
    for folder in (theirs, theirs / "train"):
        with pytest.raises(DataError, match=r"MLPerf's FLUX.1: .*convert \S+ --link --output_dir"):
            check_data(config(folder))
    out = tmp_path / "linked"
    assert convert(theirs, out, "--link") == 0
    assert files_in(theirs) == before  # nothing is written there
    for name, samples in shard_counts(out).items():
        report = inspect_shard(out, name, expected=samples)
        assert not report.problems and len(report.seen) == samples
    run = config(out)
    assert check_data(run).samples == 8
    null = null_inputs(run)
    assert torch.equal(null["text"], null_texts()["t5"][0])
    assert torch.equal(null["pooled_text"], null_texts()["clip"][0])
    loader = build_train_loader(run, rank=0, world_size=1)
    seen = set()
    for _ in range(12):
        pack = next(loader)
        variance = pack.method(LatentVariance)
        assert variance is not None and pack.method(FixedLevels) is None
        means = unpack_latents(pack.latent_TC, pack, patch_temporal=1, patch_spatial=2)
        logvars = unpack_latents(variance.logvar_TC, pack, patch_temporal=1, patch_spatial=2)
        for n, key in enumerate(pack.keys):
            number = int(key.split("/")[-1])
            seen.add(number)
            if not number:  # the large one, whose head alone is read first
                assert means[n].shape == (2, 1, 64, 64)
                continue
            mean, logvar = normalised(number)
            assert torch.equal(means[n], mean) and torch.equal(logvars[n], logvar)
            rows = pack.text_LE[slice(*pack.text_starts[n : n + 2])]
            given = tensors_of(number)
            assert torch.equal(rows, given["t5"])
            assert torch.equal(pack.vectors["pooled_text"][n], given["clip"])
    loader.close()
    assert seen == {*range(8)}
    groups = validation_groups(run)
    plan = groups.plan(100)
    packs = groups.read(plan.groups)
    levels = [level for pack in packs for level in pack.method(FixedLevels).indices]
    assert sorted(levels) == sorted([*range(8)] * 2) and not plan.refused


def test_a_conversion_holds_the_distribution(theirs: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    assert convert(theirs, out) == 0
    card = json.loads((out / "dataset_card.json").read_text())
    assert card["latent"]["dtype"] == "bfloat16" and card["splits"]["val"]["samples"] == 16
    assert card["latent"]["mean"] == [0.1159] * 2 and card["latent"]["std"] == [1 / 0.3611] * 2
    found = {record.about["source"]: record for record in read_shards(out)}
    assert len(found) == 24 and found["cc-103"].about["timestep"] == 3
    for number in (1, 7, 104):
        tensors, (mean, logvar) = found[f"cc-{number}"].tensors, normalised(number)
        assert torch.equal(tensors["latent"], mean.bfloat16())
        assert torch.equal(tensors["latent_logvar"], logvar.bfloat16())
        assert torch.equal(tensors["text"], tensors_of(number)["t5"])
    run = config(out)
    assert torch.equal(null_inputs(run)["text"], null_texts()["t5"][0])
    pack = next(build_train_loader(run, rank=0, world_size=1))
    assert pack.method(LatentVariance) is not None
    # Another tool's cache gets the mean, as its autoencoder makes it; the variances are counted
    (out / "dataset_card.json").write_text(json.dumps(card | {"processor": {"name": "flux"}}))
    made = export(out, form="parquet", shard_size=100)
    assert made.samples == 24 and made.left_out["latent_logvar"] == 24
    rows = {one.about["source"]: one for one in read_parquet(out) if isinstance(one, CachedSample)}
    mean = tensors_of(104)["mean"].float()[:, None]
    torch.testing.assert_close(rows["cc-104"].tensors["latent"], mean, atol=2e-2, rtol=1e-2)


def expected() -> Expected:
    run = config(Path("unused"))
    return Expected.of(run)


def replaced(**parts: bytes | None) -> Parts:
    found = parts_of(1, timestep=2)
    for name, content in parts.items():
        if content is None:
            del found[f"{name}.bytes"]
        else:
            found[f"{name}.bytes"] = content
    return found


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


FAULTS = [
    (
        {"mean": saved(np.zeros((2, 4, 4), np.float32))},
        Reject.UNDECODABLE,
        r".mean.bytes is float32",
    ),
    (
        {"mean": saved(np.zeros((2, 4, 4), np.uint16, order="F"))},
        Reject.UNDECODABLE,
        r".mean.bytes is uint16 by columns, not uint16 by rows",
    ),
    ({"t5": bits(torch.ones(3, 8))[:-2]}, Reject.UNDECODABLE, r".t5.bytes has 46 bytes of numbers"),
    ({"t5": bits(torch.ones(0, 8))}, Reject.UNDECODABLE, r"shape \[0, 8\], and needs \[L, E\]"),
    ({"clip": bytes(9)}, Reject.UNDECODABLE, r".clip.bytes has 9 bytes of numbers"),
    ({"clip": bits(torch.ones(6))}, Reject.INPUT_SHAPE, r"`pooled_text` has shape \[6\]"),
    ({"logvar": None}, Reject.MISSING_PART, r"no .logvar.bytes; it has .json"),
    ({"logvar": bits(torch.ones(2, 4, 2))}, Reject.LOGVAR, r"shape \[2, 1, 4, 2\], but the latent"),
    ({"logvar": bits(torch.full((2, 4, 4), 50.0))}, Reject.LOGVAR, r"numbers above 40"),
    ({"logvar": bits(torch.full((2, 4, 4), math.nan))}, Reject.LOGVAR, r"has NaN"),
    ({"mean": b"\x93NUMPY" + bytes(40)}, Reject.UNDECODABLE, r".mean.bytes has a damaged header"),
]


@pytest.mark.parametrize(("parts", "reason", "said"), FAULTS)
def test_faults_have_names(parts: Parts, reason: Reject, said: str) -> None:
    with pytest.raises(SampleRefused) as caught:
        cook(replaced(**parts), expected(), key="k")
    assert caught.value.reason is reason
    assert re.search(said, caught.value.detail), caught.value.detail


@pytest.mark.parametrize("plain", [False, True])
def test_the_head_of_a_record_tells_its_size(plain: bool) -> None:
    record, told = parts_of(3, plain=plain), expected()
    sample = cook(record, told, key="k")
    assert measure_sample(record, told) == SampleSize.of(sample, told.layout)


def test_pairs_take_no_distribution() -> None:
    told = expected()
    rejected = SampleInput(
        name="rejected_latent", kind=InputKind.REJECTED, width=CHANNELS, required=False
    )
    assert cook(parts_of(1), told, key="k").latent_logvar_CFHW is not None
    inputs = (*told.layout.inputs, rejected)
    paired = replace(told, layout=replace(told.layout, inputs=inputs))
    with pytest.raises(SampleRefused) as caught:
        cook(parts_of(1), paired, key="k")
    assert caught.value.reason is Reject.LOGVAR and "objective.preference" in caught.value.detail


@pytest.mark.parametrize("options", [(), ("--link",)])
@pytest.mark.parametrize(
    "fault", ["t5_empty.npy", "clip_empty.npy", "garbage", "bits", "level", "unequal"]
)
def test_a_bad_set_is_no_dataset(
    theirs: Path, tmp_path: Path, fault: str, options: tuple[str, ...], capsys
) -> None:
    if fault.endswith(".npy"):
        (theirs / "empty_encodings" / fault).unlink()
        said = f"{fault} is missing"
    elif fault in ("garbage", "bits"):
        content = b"hello" if fault == "garbage" else saved(np.ones((1, ROWS, WIDTH), np.uint16))
        (theirs / "empty_encodings" / "t5_empty.npy").write_bytes(content)
        what = "it is not an array of NumPy" if fault == "garbage" else "it is torch.uint16"
        said = f"empty_encodings/t5_empty.npy: {what}"
    elif fault == "level":
        write(theirs / "zip", [parts_of(299, timestep=3), parts_of(300, timestep=8)])
        where = "key 00000001: " if options else "shard_000000/00000001 ("
        said = f"{where}.json: timestep=8 is not a whole number from 0 to 7"
    else:
        write(theirs / "zip", [parts_of(300, timestep=5)])
        said = "2 of 4/8, 3 of 5/8, 2 of 6/8"
    out = tmp_path / "out"
    code = convert(theirs, out, *options, "--max_bad_fraction", "0")
    printed = capsys.readouterr()
    assert code != 0 and said in " ".join((printed.out + printed.err).split())
    assert not (out / ".nv-meta").exists()


@pytest.mark.parametrize("options", [(), ("--link",)])
def test_tars_without_a_sample_are_passed_over(
    theirs: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    tarfile.open(theirs / "train" / "a_first.tar", "w").close()
    tarfile.open(theirs / "val" / "shard_000009.tar", "w").close()
    assert convert(theirs, tmp_path / "out", *options) == 0
    counts = shard_counts(tmp_path / "out")
    assert sum(counts.values()) == 24 and min(counts.values()) > 0
    loader = build_train_loader(config(tmp_path / "out"), rank=0, world_size=1)
    assert next(loader).keys
    loader.close()


def test_a_dataset_of_ours_below_is_not_read_again(theirs: Path) -> None:
    for options in ((), ("--link",), ("--link",), ()):
        assert convert(theirs, theirs / "a", *options, "--overwrite") == 0
        assert sum(shard_counts(theirs / "a").values()) == 24


@pytest.mark.parametrize(
    ("name", "said"), [("none", "is missing"), ("file", "is not a folder"), ("index", "no *.tar")]
)
def test_a_folder_without_shards_is_named(tmp_path: Path, name: str, said: str, capsys) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.txt").write_text("shard_000000.tar\n")
    assert convert(tmp_path / name, tmp_path / "out", "--link") != 0
    printed = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / name} " in printed and said in printed and "give the folder" in printed


@pytest.mark.parametrize("fault", ["cut", "garbled", "gone"])
def test_no_tar_is_linked_in_part(theirs: Path, tmp_path: Path, fault: str, capsys) -> None:
    """For tarfile, a header that it cannot read is the end of a tar."""
    path = theirs / "train" / "shard_000001.tar"
    with tarfile.open(path) as tar:
        second = next(one.offset for one in tar if one.name.startswith("00000007"))
    content = path.read_bytes()
    if fault == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    elif fault == "cut":
        path.write_bytes(content[: second + 700])
    else:
        path.write_bytes(content[:second] + b"\x07" * 512 + content[second + 512 :])
    assert convert(theirs, tmp_path / "out", "--link") != 0
    printed = "".join(capsys.readouterr().err.split())
    assert printed.count(f"{path}:") == 1 and "restoreitormoveit" in printed
    assert not (tmp_path / "out" / ".nv-meta").exists()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"json": b"{}", "txt": b"a caption"}, "there is no .clip.bytes, only .json, .txt"),
        (parts_of(300) | {"json": b"[3]"}, ".json holds a list, not an object"),
        (parts_of(300) | {"json": b"{"}, ""),  # the words of Python's reader of JSON
    ],
)
def test_a_tar_of_something_else_is_not_linked(
    theirs: Path, tmp_path: Path, parts: Parts, said: str, capsys
) -> None:
    write(theirs / "zip", [parts])
    (path,) = (theirs / "zip").glob("*.tar")
    assert convert(theirs, tmp_path / "out", "--link") != 0
    printed = " ".join(capsys.readouterr().err.split())
    assert f"{path}: key 00000000: {said}" in printed
    assert not (tmp_path / "out" / ".nv-meta").exists()


def test_the_command_of_the_message_runs_as_it_is_printed(theirs: Path, tmp_path: Path) -> None:
    folder = theirs.rename(tmp_path / "MLPerf's Größe für alle")
    with pytest.raises(DataError, match=r"with `(.*)`") as caught:
        check_data(config(folder))
    words = shlex.split(re.findall("with `(.*)`", str(caught.value))[0])
    assert words[:3] == ["python", "-m", "data_prep"] and main(words[3:]) == 0
    assert check_data(config(Path(words[-1]))).samples == 8


def test_null_texts_beside_the_shards_are_read_or_missed(theirs: Path, tmp_path: Path) -> None:
    """A folder that `energon prepare` has prepared in its place has null texts of its own."""
    out = tmp_path / "linked"
    assert convert(theirs, out, "--link") == 0
    (out / "null_text.safetensors").unlink()
    with pytest.raises(DataError, match=r"linked/t5_empty.npy is missing"):
        null_inputs(config(out))
    for file in (theirs / "empty_encodings").iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    assert torch.equal(null_inputs(config(out))["text"], null_texts()["t5"][0])
