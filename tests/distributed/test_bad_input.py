"""What is wrong with the input is said once, with what to do, or counted; no traceback, no hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.entering import Enter, Outcome
from tests.launching import ROOT, SMALL, command, environment, metrics, own_words, run_cold
from tests.shard_edits import SHARD, cut_short, edited

DIGITS = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL)
QUICK = ("dataset.num_workers=0", "train.train_iters=5", "train.global_batch_size=4")
"""Five steps of four packs of 16 digits: 320, which is more than one pass over the 215."""

Train = Callable[..., Outcome]


@pytest.fixture
def train(enter: Enter, tmp_path: Path) -> Train:
    """Trains on a dataset for a few steps, into the folder `run`, without validation."""

    def call(dataset: Path, *arguments: str) -> Outcome:
        places = (f"dataset.path={dataset}", f"checkpoint.save={tmp_path / 'run'}")
        asked = (*DIGITS, *places, *QUICK, "train.eval_interval=0", *arguments)
        return enter("pretrain_dit", *asked)

    return call


@pytest.fixture(scope="module")
def trained(enter: Enter, digits: Path, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 2 and 3, to be copied and not changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    places = (f"dataset.path={digits}", f"checkpoint.save={folder}")
    steps = ("train.train_iters=3", "checkpoint.save_interval=2", "train.eval_interval=0")
    done = enter("pretrain_dit", *DIGITS, *places, *QUICK, *steps)
    assert done.code == 0, done.said
    return folder


def _says(outcome: Outcome, *parts: object) -> None:
    error = outcome.error()
    for part in parts:
        assert str(part) in error


@pytest.mark.slow
def test_folder_without_meta(train, digits, tmp_path):
    shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".nv-meta"))
    said = train(tmp_path / "data")
    _says(said, tmp_path / "data", "has no .nv-meta/.info.json", "python -m data_prep")
    assert not (tmp_path / "run").exists()


def test_empty_folder(train, tmp_path):
    (tmp_path / "data").mkdir()
    _says(train(tmp_path / "data"), tmp_path / "data", "energon prepare")


def test_shard_cut_short_is_counted_and_the_run_goes_on(train, digits, tmp_path):
    done = train(cut_short(digits, tmp_path / "data", lost=2), "dataset.max_bad_fraction=0.02")
    assert done.code == 0, done.said
    refused = [line["refused"] for line in metrics(tmp_path / "run")]
    assert refused[-1] >= 2
    assert refused == sorted(refused)
    assert f"refused samples: {refused[-1]} shard cannot be read" in done.said
    assert f"{tmp_path / 'data'}/{SHARD}, key " in done.said


@pytest.mark.parametrize("allowed", [0.0, 0.2])
def test_damage_above_the_tolerance_ends_the_run(train, digits, tmp_path, allowed):
    data = cut_short(digits, tmp_path / "data", lost=100)
    said = train(data, f"dataset.max_bad_fraction={allowed}")
    _says(said, "samples cannot be used, more than", f"dataset.max_bad_fraction={allowed}")
    _says(said, f"{data}/{SHARD}, key ", "pack the data again")


@pytest.mark.parametrize(("file", "why"), [(SHARD, "missing"), (f"{SHARD}.idx", "missing")])
def test_missing_files_are_seen_before_anything_is_written(train, digits, tmp_path, file, why):
    data = shutil.copytree(digits, tmp_path / "data")
    (data / file).unlink()
    for asked in ((), ("--dry-run",)):
        _says(train(data, *asked), f"{data / file} is {why}", "restore it")
    assert not (tmp_path / "run").exists()


def test_damaged_index_is_named(train, digits, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data")
    index = data / f"{SHARD}.idx"
    index.write_bytes(index.read_bytes()[::-1])
    for workers in (0, 2):
        said = train(data, f"dataset.num_workers={workers}")
        _says(said, f"{index} is damaged", f"energon prepare --tar-index-only {data}")


def _with_nan(tensors):
    tensors["latent"][0, 0, 0, 0] = torch.nan
    return tensors


def _without_text(tensors):
    return {"latent": tensors["latent"]}


@pytest.mark.parametrize(
    ("fault", "reason"), [(_with_nan, "latent has NaN or Inf"), (_without_text, "text is missing")]
)
def test_one_bad_sample_is_counted_and_the_run_goes_on(train, digits, tmp_path, fault, reason):
    data = edited(digits, tmp_path / "data", fault, count=1)
    done = train(data)
    assert done.code == 0, done.said
    lines = metrics(tmp_path / "run")
    assert lines[-1]["refused"] in (1, 2)  # in the first pass, perhaps again in the second
    assert all(line["pack_fill"] == 1 for line in lines)
    assert f"{lines[-1]['refused']} {reason}" in done.said
    named = (tmp_path / "run/refused_samples.jsonl").read_text().splitlines()
    (first,) = map(json.loads, named)  # once, though it is met again in the second pass
    assert (first["shard"], first["dataset"]) == (SHARD, str(data))
    assert reason in first["reason"] and first["key"] in done.said
    assert f"{data}/{SHARD}, key " in done.said


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("model.in_channels=8", ("latent.channels is 4", "set model.in_channels=4")),
        ("dataset.task_encoder_seq_length=8", ("takes 16 tokens", "raise dataset.task_encoder_s")),
    ],
)
def test_no_sample_fits_the_model(train, digits, tmp_path, setting, values):
    shorter = "dataset.sample_multiple=8"  # a pack of 8 tokens has to be a multiple of it
    said = train(digits, setting, shorter)
    _says(said, setting, f"{digits}/dataset_card.json: ", *values)
    bare = shutil.copytree(digits, tmp_path / "bare")
    (bare / "dataset_card.json").unlink()  # then the samples have to be looked at
    key = setting.partition("=")[0]
    _says(train(bare, setting, shorter), setting, f"{bare}: none of ", f" {key}")


def test_text_of_another_width(train, digits, tmp_path):
    wide = "model.crossattn_emb_size=32"
    _says(
        train(digits, wide), "text_encoder.width is 256", wide, "set model.crossattn_emb_size=256"
    )
    shutil.copytree(digits, tmp_path / "data")
    (tmp_path / "data/dataset_card.json").unlink()
    _says(train(tmp_path / "data", wide), wide, ", 256]")
    (tmp_path / "data/null_text.safetensors").unlink()
    said = train(tmp_path / "data", "model.crossattn_emb_size=32")
    _says(said, "has width 256, model.crossattn_emb_size=32", "set model.crossattn_emb_size to")


def test_no_validation_split(train, digits, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    split = data / ".nv-meta/split.yaml"
    parts = yaml.safe_load(split.read_text())
    parts["split_parts"]["val"] = []
    split.write_text(yaml.safe_dump(parts))
    validating = ("train.eval_interval=5", "train.eval_iters=1")
    said = train(data, *validating)
    _says(said, data, "no samples in split `val`", "dataset.use_train_split_for_val=true")
    assert train(data, *validating, "dataset.use_train_split_for_val=true").code == 0
    assert "val_loss" in metrics(tmp_path / "run")[-1]


def test_run_folder_that_is_a_file(train, digits, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file", tmp_path / "file/run"):
        said = train(digits, f"checkpoint.save={place}")
        _says(said, f"checkpoint.save={place} cannot be written", "choose a folder")


def test_run_folder_that_is_a_dataset(train, digits):
    said = train(digits, f"checkpoint.save={digits}")
    _says(said, f"checkpoint.save={digits} is a dataset", "choose another folder")
    assert not (digits / "checkpoints").exists()


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """Where `train` goes on with a copy of the trained run."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("step_00000009", "which is not there"),
        ("", "must hold the name of a folder beside it"),
        ("\x00\xff", "must hold the name of a folder beside it"),
    ],
)
def test_pointer_to_no_checkpoint(train, enter, copied, digits, written, why):
    (copied / "checkpoints/LATEST").write_text(written)
    for said in (train(digits), enter("generate_dit", *_picture(copied))):
        _says(said, copied / "checkpoints/LATEST", why, "write step_00000003")


def _picture(path: Path) -> tuple[str, ...]:
    asked = ("--checkpoint_path", str(path), "--prompt", "a handwritten seven", "--num_steps", "2")
    return (*asked, "--output_dir", str(path / "pictures"))


def test_checkpoint_that_is_cut_short(train, enter, copied, digits):
    place = copied / "checkpoints/step_00000003"
    largest = max(place.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    for said in (train(digits), enter("generate_dit", *_picture(copied))):
        _says(said, place, "is damaged, with", "write step_00000002 into")
    assert len(metrics(copied)) == 3  # the record of the run is as it was


def test_resume_with_other_workers(train, copied, digits):
    done = train(digits, "dataset.num_workers=3")
    assert done.code == 0, done.said
    assert "data-parallel size 1 x dataset.num_workers 0 when saved, 1 x 3 now" in done.said
    assert "none is left out or repeated" in done.said
    assert [line["step"] for line in metrics(copied)] == [1, 2, 3, 4, 5]


def test_no_checkpoint_to_generate_from(enter, tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        _says(enter("generate_dit", *_picture(place)), f"--checkpoint_path {place} holds no check")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--num_images_per_prompt", "0"), ("--num_images_per_prompt 0", "at least 1")),
        (("--guidance_rescale", "2"), ("--guidance_rescale 2.0", "lie in [0, 1]")),
        (("--guidance_interval", "1", "0"), ("--guidance_interval 1.0 0.0", "the lower first")),
        (("--context_parallel_size", "2"), ("1 processes", "--nproc-per-node 2")),
        (("--height", "0"), ("--height 0", "at least 1")),
        (("--width", "-8"), ("--width -8", "at least 1")),
        (("--num_steps", "0"), ("--num_steps 0", "at least 1")),
        (("--num_video_frames", "0"), ("--num_video_frames 0", "at least 1")),
        (("--guidance", "nan"), ("--guidance nan", "a finite number")),
        (("--fps", "0"), ("--fps 0.0", "must lie in 0.01 to 1000")),
    ],
)
def test_pictures_that_cannot_be(enter, trained, tmp_path, flags, parts):
    asked = (*_picture(trained), "--output_dir", tmp_path, *flags)
    _says(enter("generate_dit", *asked), *parts)
    assert not list(tmp_path.iterdir())


def test_prompts_that_are_not_there(enter, trained, tmp_path):
    asked = ("--checkpoint_path", trained, "--output_dir", tmp_path / "pictures")
    file = tmp_path / "prompts.txt"
    _says(enter("generate_dit", *asked, "--prompts_file", file), file, "is not there")
    file.write_text("\n \n")
    _says(enter("generate_dit", *asked, "--prompts_file", file), file, "write one on each line")
    file.write_bytes(b"\xff\xfe\x00")
    _says(enter("generate_dit", *asked, "--prompts_file", file), file, "save it as UTF-8")


def test_output_folder_that_is_a_file(enter, trained, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    said = enter("generate_dit", *_picture(trained), "--output_dir", tmp_path / "file")
    _says(said, f"--output_dir {tmp_path / 'file'}", "choose a folder")


def test_prompt_for_a_model_without_its_text_encoder(enter, tmp_path):
    mock = ("--mock", "dataset.task_encoder_seq_length=512", "train.global_batch_size=1")
    steps = ("train.train_iters=3", "train.eval_interval=0", f"checkpoint.save={tmp_path}")
    conf = str(ROOT / "conf/dit_debug.yaml")
    done = enter("pretrain_dit", "--config-file", conf, *SMALL[:4], *mock, *steps)
    assert done.code == 0, done.said
    said = enter("generate_dit", *_picture(tmp_path))
    _says(said, tmp_path, "without a text encoder", "train on a dataset that")


@pytest.mark.slow
def test_two_processes_that_find_no_sample_say_so_once(digits, tmp_path):
    places = (f"dataset.path={digits}", f"checkpoint.save={tmp_path / 'run'}")
    asked = (*DIGITS, *places, *QUICK, "train.eval_interval=0", "model.in_channels=8")
    done = run_cold(command("pretrain_dit.py", *asked, nproc=2), timeout=90)
    assert done.returncode != 0
    _says(_ours(done.stderr), "model.in_channels=8", "channels is 4", "set model.in_channels=4")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_loader_process_ends_the_run(digits, tmp_path, nproc):
    places = (f"dataset.path={digits}", f"checkpoint.save={tmp_path / 'run'}")
    endless = ("train.train_iters=1000000", "train.eval_interval=0", "dataset.num_workers=1")
    asked = (*DIGITS, *places, "train.global_batch_size=2", *endless)
    process = subprocess.Popen(
        command("pretrain_dit.py", *asked, nproc=nproc),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    written = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (written.exists() and written.read_text()):
        time.sleep(0.1)
    trainers = _children(process.pid)
    os.kill(_loaders(trainers[-1])[0], signal.SIGKILL)
    family = [*trainers, *(child for trainer in trainers for child in _children(trainer))]
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    _says(_ours(said), "a loader process has died", "Lower dataset.num_workers", "resumes")
    deadline = time.monotonic() + 20  # the kernel ends orphans a moment later
    while (left := [pid for pid in family if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _ours(said: str) -> Outcome:
    return Outcome(1, own_words(said))


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for one in threads for child in (one / "children").read_text().split()]


def _loaders(trainer: int) -> list[int]:
    """Forked children: they show the command of the trainer itself."""
    mine = Path(f"/proc/{trainer}/cmdline").read_bytes()
    forked = [p for p in _children(trainer) if Path(f"/proc/{p}/cmdline").read_bytes() == mine]
    assert forked
    return forked


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
