"""What a run goes on from, as users type it: other settings, damage, the weights of another run."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from data_prep.cli.parser import main as pack
from dit.command_line import python
from tests.entering import Enter, Outcome
from tests.holding import held
from tests.launching import ROOT, SMALL, command, metrics, numbers, run
from tests.shard_edits import edited


@pytest.fixture
def pretrain(enter: Enter, digits: Path):
    """Trains into a folder, with changes to the configuration."""

    def call(folder: Path, *changes: str) -> Outcome:
        config = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL)
        places = (f"dataset.path={digits}", f"checkpoint.save={folder}", "dataset.num_workers=0")
        steps = ("train.train_iters=2", "checkpoint.save_interval=1", "train.eval_interval=0")
        steps += ("scheduler.lr_warmup_iters=0",)
        return enter("pretrain_dit", *config, *places, *steps, *changes)

    return call


def _said(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.said
    return outcome.said


def test_what_has_changed_is_said_when_a_run_goes_on(pretrain, tmp_path):
    _said(pretrain(tmp_path))
    changes = ("train.train_iters=3", "optimizer.lr=1e-3", "train.global_batch_size=2")
    said = _said(pretrain(tmp_path, *changes))
    assert "continuing after step 2" in said
    assert "changed since then: train.train_iters 2 -> 3, train.global_batch_size 1 -> 2," in said
    assert "optimizer.lr 0.002 -> 0.001" in said
    assert len(metrics(tmp_path)) == 3


def test_what_only_the_start_of_a_run_reads_is_said_to_have_no_effect(pretrain, tmp_path):
    plain, run, other = (tmp_path / name for name in ("plain", "run", "other"))
    _said(pretrain(run))
    for copy in (plain, other):
        shutil.copytree(run, copy)
    late = (f"checkpoint.load={other}", "checkpoint.finetune=true", "train.warm_start_ema=true")
    late += ("checkpoint.finetune_weights=ema", "model.init_method_std=0.1")
    late += ("validation.at_start=true",)
    longer = ("train.train_iters=3", "train.eval_interval=3", "train.eval_iters=1")
    assert "without effect" not in _said(pretrain(plain, *longer))
    said = _said(pretrain(run, *longer, *late))
    named = said.partition("changed without effect, because only a new run reads it: ")[2]
    for setting in late:
        assert f"{setting.partition('=')[0]} " in named.splitlines()[0]
    assert all(
        setting.partition("=")[0] not in said.partition("changed without")[0] for setting in late
    )
    assert numbers(run) == numbers(plain)
    continued = _said(pretrain(tmp_path / "new", "train.train_iters=3", f"checkpoint.load={other}"))
    assert "checkpoint.load null -> " in continued and "without effect" not in continued


def test_the_lowest_loss_is_sought_anew_where_validation_measures_otherwise(pretrain, tmp_path):
    validated = ("train.eval_interval=1", "train.eval_iters=1", "ema.kind=none")
    worse = ("train.train_iters=3", "optimizer.lr=0.5", "optimizer.min_lr=0.5")
    _said(pretrain(tmp_path / "same", *validated))
    otherwise = {"packs": "train.eval_iters=2", "latents": "validation.latents=drawn"}
    for name in otherwise:
        shutil.copytree(tmp_path / "same", tmp_path / name)
    for name, more in (("same", ()), *((n, (key,)) for n, key in otherwise.items())):
        said = _said(pretrain(tmp_path / name, *validated, *worse, *more))
        lowest = (tmp_path / name / "checkpoints/LOWEST_VAL").read_text()
        assert ("the lowest loss is sought anew" in said) == (name in otherwise)
        assert (lowest == "step_00000003") == (name in otherwise)


@pytest.fixture(scope="module")
def more_digits(tmp_path_factory) -> Path:
    """The same digits and 40 more."""
    folder = tmp_path_factory.mktemp("more") / "data"
    assert pack(["digits", "--num_samples", "280", "--output_dir", str(folder)]) == 0
    return folder


def _anew(*changes: str) -> tuple[str, ...]:
    return ("checkpoint.load_data_position=false", *changes)


@pytest.mark.slow
def test_other_data_are_refused_with_both_places_and_the_way_to_take_them_in(
    pretrain, tmp_path, digits, more_digits
):
    _said(pretrain(tmp_path / "old"))
    new = (f"dataset.path={more_digits}", "train.train_iters=3")
    for folder in ("old", "new"):
        said = pretrain(tmp_path / folder, f"checkpoint.load={tmp_path}/old", *new).error()
        assert f"dataset.path, blend, mock: {digits} (index" in said
        assert f") when saved, {more_digits} (index" in said
        assert "begin the data anew with checkpoint.load_data_position=false: weights," in said
        assert "start a new run" not in said


@pytest.mark.slow
@pytest.mark.parametrize("place", ["old", "new"])
def test_a_run_takes_in_other_data_and_keeps_the_rest(pretrain, tmp_path, more_digits, place):
    """The same losses whether the run with the new data is ended in between or not."""
    old, whole = tmp_path / "old", tmp_path / "whole"
    settings = (f"dataset.path={more_digits}", "scheduler.lr_decay_iters=10")
    settings = _anew(*settings, f"checkpoint.load={old}")
    _said(pretrain(old, "scheduler.lr_decay_iters=10"))
    shutil.copytree(old, whole)
    said = _said(pretrain(whole, *settings, "train.train_iters=5"))
    assert "continuing after step 2" in said
    assert "the data begin anew, since checkpoint.load_data_position=false; weights," in said
    for steps, begins in ((3, True), (5, False)):
        said = _said(pretrain(tmp_path / place, *settings, f"train.train_iters={steps}"))
        assert f"continuing after step {2 if begins else 3}" in said
        assert ("the data begin anew" in said) == begins
    wanted, found = numbers(whole)[2:], numbers(tmp_path / place)[-3:]
    assert found == wanted
    assert found[-1]["lr"] < 0.002  # the schedule went on
    assert found[-1]["epoch"] == wanted[-1]["epoch"] < 1


def test_more_samples_in_the_same_folder_are_other_data(pretrain, tmp_path, digits, more_digits):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(digits, data)
    _said(pretrain(run, f"dataset.path={data}"))
    shutil.rmtree(data)
    shutil.copytree(more_digits, data)
    changes = (f"dataset.path={data}", "train.train_iters=3")
    said = pretrain(run, *changes).error()
    assert (
        f"dataset.path, blend, mock: {data} has other shards, splits or weights now (index" in said
    )
    assert "the data begin anew" in _said(pretrain(run, *_anew(*changes)))
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]


@pytest.mark.slow
def test_data_that_were_encoded_otherwise_in_the_same_shards_are_named(pretrain, tmp_path, digits):
    """Shards of as many samples, by another autoencoder, have the same index."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(digits, data)
    said = _said(pretrain(run, f"dataset.path={data}", "train.train_iters=1"))
    assert "prepared otherwise" not in said
    card = json.loads((data / "dataset_card.json").read_text())
    card["processor"]["name"] = "flux"
    (data / "dataset_card.json").write_text(json.dumps(card))
    said = _said(pretrain(run, f"dataset.path={data}"))
    assert "prepared otherwise when the checkpoint was saved (processor.name: pixel, flux)" in said


def test_data_begin_anew_on_other_ranks_and_workers(digits, more_digits, tmp_path):
    def go(*changes: str, nproc: int) -> str:
        places = (f"checkpoint.save={tmp_path}", "train.eval_interval=0")
        config = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL, *places)
        config += ("train.global_batch_size=4", "scheduler.lr_warmup_iters=0", *changes)
        done = run(command("pretrain_dit.py", *config, nproc=nproc))
        assert done.returncode == 0, done.stderr
        return done.stdout

    go(f"dataset.path={digits}", "dataset.num_workers=2", "train.train_iters=2", nproc=1)
    new = _anew(f"dataset.path={more_digits}", "dataset.num_workers=1")
    said = go(*new, "model.tensor_model_parallel_size=2", "train.train_iters=4", nproc=4)
    assert "the data begin anew" in said
    said = go(*new, "dataset.num_workers=2", "train.train_iters=6", nproc=1)
    assert "the same 2 readers go on" in said
    assert "the data begin anew" not in said


def test_a_new_run_starts_from_weights_once(pretrain, tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    _said(pretrain(base))
    new = (f"checkpoint.load={base}", "checkpoint.finetune=true", "objective.name=flow")
    said = _said(pretrain(tuned, *new, "rng.seed=7", "ema.kind=none"))
    assert f"starting at step 0 from the weights of {base}/checkpoints/step_00000002" in said
    assert 'objective.name "edm" -> "flow"' in said
    assert [line["step"] for line in metrics(tuned)] == [1, 2]
    assert metrics(tuned)[-1]["consumed_samples"] == metrics(base)[-1]["consumed_samples"]
    said = _said(pretrain(tuned, *new, "rng.seed=7", "ema.kind=none", "train.train_iters=3"))
    assert "continuing after step 2" in said
    assert len(metrics(tuned)) == 3


def test_the_run_to_continue_may_be_its_own_folder(pretrain, tmp_path):
    """Where the first checkpoint is still to come; later its own counts, not `load`."""
    own = f"checkpoint.load={tmp_path}/x/../new"
    (tmp_path / "x").mkdir()
    _said(pretrain(tmp_path / "new", own, "--dry-run"))
    assert "continuing" not in _said(pretrain(tmp_path / "new", own))
    typo = f"checkpoint.load={tmp_path}/typo"
    assert "continuing after step 2" in _said(pretrain(tmp_path / "new", typo))


@pytest.mark.slow
def test_a_run_that_is_done_says_what_can_be_done_with_it(pretrain, tmp_path):
    """Each line is a command that works as it stands; a folder's name may have a space."""
    folder = tmp_path / "my run"
    said = _said(pretrain(folder))
    lines = said.partition("done after step 2\nwhat can be done with it:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == ["pictures", "report", "Diffusers"]
    for line in lines:
        _, interpreter, *words = shlex.split(line)
        done = run([sys.executable, *words])
        assert interpreter == python() and done.returncode == 0, done.stdout + done.stderr
    for place in ("generated/samples.json", "report.html", "diffusers/config.json"):
        assert (folder / place).is_file()


def test_a_run_on_mock_data_gets_a_report_alone(pretrain, tmp_path):
    said = _said(pretrain(tmp_path, "dataset.mock=true", "dataset.path=null"))
    assert said.endswith(f"  report     {python()} -m dit.report {tmp_path}\n")


def test_adapters_beside_drawn_weights_go_on(pretrain, tmp_path):
    """Weights that are in no file are drawn again, and another seed would draw others."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    mock = ("dataset.mock=true", "dataset.path=null", "lora.rank=2", "scheduler.lr_decay_iters=9")
    _said(pretrain(parts, *mock))
    for wrong in ("rng.seed=7", "model.init_method_std=0.1"):
        anew = "checkpoint.load_data_position=false"
        said = pretrain(parts, *mock, "train.train_iters=4", wrong, anew).error()
        assert "are in no file: each start draws them again" in said
        assert wrong in said
    assert "continuing after step 2" in _said(pretrain(parts, *mock, "train.train_iters=4"))
    _said(pretrain(whole, *mock, "train.train_iters=4"))
    assert numbers(parts) == numbers(whole)
    assert not any(line["skipped"] for line in metrics(parts))


def test_a_run_whose_every_step_was_skipped_does_not_end_well(pretrain, digits, tmp_path):
    def overflow(tensors):  # finite, and its square is not
        return tensors | {"latent": torch.full_like(tensors["latent"], 3e38, dtype=torch.bfloat16)}

    huge = f"dataset.path={edited(digits, tmp_path / 'huge', overflow, count=215)}"
    run = tmp_path / "run"
    first = pretrain(run, huge)
    assert "every step was skipped (2 steps), because its loss or gradient was not" in first.error()
    assert f"{run}/skipped_samples.jsonl" in first.said and "done after" not in first.said
    assert "every step was skipped (2 steps)" in pretrain(run).error()  # nothing is left to do
    assert "done after step 3" in _said(pretrain(run, "train.train_iters=3"))
    later = pretrain(run, huge, "train.train_iters=4")
    assert "every step was skipped (1 step)" in later.error()
    assert "done after step 4" in _said(pretrain(run))


def test_a_folder_that_another_run_writes_to_is_refused_before_anything_is_changed(
    pretrain, tmp_path
):
    with held(tmp_path) as (process, _):
        said = pretrain(tmp_path).error()
    assert f"checkpoint.save={tmp_path} is in use: process {process.pid} on" in said
    assert not (tmp_path / "metrics.jsonl").exists()
    _said(pretrain(tmp_path))
    assert not (tmp_path / ".lock").exists()
