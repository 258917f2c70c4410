"""The teacher of a distillation: which weights it has, and that nothing changes them."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dit.checkpoint_paths import CheckpointError
from dit.config import RunConfig, Sampler
from dit.config_loading import load_config
from dit.convert.export import export_weights
from dit.convert.megatron_checkpoint import StoredWeights
from dit.sizing.memory import memory, parameters_here
from dit.train.metrics.interval_metrics import StudentLatents, drift_of
from dit.train.opening.checks import check_start
from dit.train.trainer import measure_steps, pretrain
from recipes.runs import read_folder
from tests.launching import metrics
from tests.learning import tiny_run

KEYS = (
    *("objective.name=flow", "objective.text_dropout=0", "train.eval_interval=0"),
    *("dataset.num_workers=0", "dataset.task_encoder_seq_length=64", "optimizer.lr=1e-2"),
    *("dataset.packing_buffer_size=4", "train.global_batch_size=2", "scheduler.lr_warmup_iters=0"),
    *("dataset.mock_samples=[{height: 8, width: 8, text_length: 3, weight: 1}]",),
    *("checkpoint.save_interval=2", "ema.kind=constant", "ema.decay=0.5", "train.train_iters=4"),
    "scheduler.lr_decay_iters=10",
    *("distill.steps=2", "distill.teacher_guidance=1", "distill.teacher_steps=1"),
)


def a_run(save: Path | None, *keys: str) -> RunConfig:
    place = () if save is None else (f"checkpoint.save={save}",)
    return load_config(tiny_run(num_layers=1), overrides=[*KEYS, *place, *keys])


@pytest.fixture(scope="module")
def trained(groups, tmp_path_factory) -> Path:
    """A run of four steps, and its export."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    assert pretrain(a_run(folder)) == 0
    export_weights(folder, folder.with_name("exported"))
    return folder


def first_loss(teacher: Path, student: Path, *keys: str) -> float:
    """Of a student that starts with the average of `student`."""
    start = (f"checkpoint.load={student}", "checkpoint.finetune=true")
    start += ("checkpoint.finetune_weights=ema", "checkpoint.save=elsewhere")
    config = a_run(None, *start, "distill.method=opd", f"distill.teacher={teacher}", *keys)
    ends: Any = {"read_folder": read_folder}
    (step,) = measure_steps(config, warm_up=0, steps=1, around=nullcontext(), **ends)
    return step["loss"]


@pytest.mark.parametrize("form", ["run", "checkpoints/step_00000004", "exported"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn_of_one_step(
    trained, form: str, tmp_path, monkeypatch
) -> None:
    """And of its other weights, or with guidance or smaller steps, it has."""
    monkeypatch.chdir(tmp_path)
    teacher = {"run": trained, "exported": trained.with_name("exported")}.get(form, trained / form)
    assert first_loss(teacher, trained) == pytest.approx(0, abs=1e-10)
    if form == "run":
        for key in ("teacher_weights=model", "teacher_guidance=3", "teacher_steps=4"):
            assert first_loss(teacher, trained, f"distill.{key}") > 1e-6


@pytest.mark.parametrize("adapted", [True, False], ids=["adapters", "whole"])
def test_a_run_goes_on_bit_for_bit_and_changes_no_teacher(trained, adapted, tmp_path) -> None:
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true")
    keys = (*start, "distill.method=opd", "distill.teacher_guidance=2", "distill.teacher_steps=2")
    keys += ("lora.rank=2",) if adapted else (f"distill.teacher={trained}",)
    before = {file: file.read_bytes() for file in trained.rglob("*.distcp")}
    moved = () if adapted else (f"distill.teacher={tmp_path / 'moved'}",)
    shutil.copytree(trained, tmp_path / "moved")
    for folder, steps in (("whole", (4,)), ("parts", (3, 4))):
        for last in steps:
            here = moved if len(steps) == 2 and last == 4 else ()
            assert (
                pretrain(a_run(tmp_path / folder, *keys, f"train.train_iters={last}", *here)) == 0
            )
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    whole, parts = (
        StoredWeights(tmp_path / name / "checkpoints/step_00000004", averaged=False)
        for name in ("whole", "parts")
    )
    for name in whole._tensors():
        assert torch.equal(whole.read_whole(name), parts.read_whole(name))
    assert {file: file.read_bytes() for file in trained.rglob("*.distcp")} == before


@pytest.mark.parametrize("method", ["opd", "dmd"])
def test_latents_that_drift_from_the_data_are_named_once(
    trained, method: str, tmp_path, capfd, monkeypatch
) -> None:
    """Of a student that has hardly learned: any drift at all is named here."""
    monkeypatch.setattr(StudentLatents, "DRIFT", 1e-9)
    keys = (f"checkpoint.load={trained}", "checkpoint.finetune=true", "lora.rank=2")
    keys += (f"distill.method={method}", "logger.log_interval=1", "distill.student_every=1")
    keys += ("objective.sampling_levels=lcm",) if method == "dmd" else ()
    assert pretrain(a_run(tmp_path / "run", *keys)) == 0
    lines = [line for line in metrics(tmp_path / "run") if "student_std" in line]
    assert len(lines) > 1
    for line in lines:
        assert 0.5 < line["student_std"] < 1.5 and line["data_std"] == pytest.approx(1, abs=0.2)
    named = [line for line in capfd.readouterr().out.splitlines() if "latents drift from" in line]
    assert len(named) == 1 and "docs/few_steps.md" in named[0]


def test_a_fifth_of_the_datas_deviation_is_a_drift() -> None:
    data = {"data_mean": 1.0, "data_std": 2.0}
    wanted = {(1.3, 2.3): None, (1.5, 2.0): "mean +25%", (1.0, 1.5): "deviation -25%"}
    for (mean, std), said in wanted.items():
        found = drift_of(data | {"student_mean": mean, "student_std": std})
        assert found == (said and f"{said} of the data's deviation")
    assert drift_of(data) is None


def test_samples_of_a_validation_are_drawn_as_a_student_learns_or_are_warned_of(
    trained, tmp_path, capfd
) -> None:
    keys = (f"checkpoint.load={trained}", "checkpoint.finetune=true", "lora.rank=2")
    keys += ("distill.method=opd", "validation.num_captions=1", "train.eval_interval=9")
    keys += ("train.eval_iters=1", "train.train_iters=1")
    for steps, warned in ((2, False), (5, True)):
        more = f"validation.sampling_steps={steps}"
        config = a_run(tmp_path / str(steps), *keys, more)
        assert config.validation_sampling.sampler is Sampler.EULER
        assert pretrain(config) == 0
        said = "with 5 steps of euler, guidance 1: pictures lose quality"
        assert (said in capfd.readouterr().out) == warned


def test_a_teacher_that_does_not_fit_is_refused_by_a_dry_run_as_well(trained, tmp_path) -> None:
    nowhere = a_run(None, "distill.method=opd", f"distill.teacher={tmp_path}/none")
    other = a_run(None, "distill.method=opd", f"distill.teacher={trained}", "model.hidden_size=64")
    for config, said in ((nowhere, "distill.teacher=.*none"), (other, "model.hidden_size")):
        with pytest.raises(CheckpointError, match=said):
            check_start(config, world_size=1)
        with pytest.raises(CheckpointError, match=said):
            pretrain(config)
    adapters = tmp_path / "adapters"
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true", "lora.rank=2")
    assert pretrain(a_run(adapters, *start)) == 0
    beside = a_run(None, "distill.method=opd", f"distill.teacher={adapters}")
    with pytest.raises(CheckpointError, match="holds adapters and no weights; add them"):
        check_start(beside, world_size=1)
    shutil.rmtree(adapters)


def test_the_memory_of_a_teacher_counts() -> None:
    plain, taught = a_run(None), a_run(None, "distill.method=opd", "distill.teacher=elsewhere")
    adapted = a_run(None, "distill.method=opd", "lora.rank=2")
    sizes = [memory(one, world_size=1).weights for one in (plain, taught, adapted)]
    assert sizes[1] - sizes[0] == 4 * parameters_here(plain.model)
    assert sizes[2] < 1.5 * sizes[0]
