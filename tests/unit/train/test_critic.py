"""The critic of DMD in a run: its checkpoint, a resume at any step of its cycle, its memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.distcp import tensor_names
from dit.models.layers.adaptable import is_adapter
from dit.train.trainer import measure_steps, pretrain
from recipes.runs import read_folder
from tests.launching import metrics
from tests.learning import tiny_run
from tests.unit.train.test_teacher import KEYS

DMD = (
    *("distill.method=dmd", "distill.student_every=3", "distill.critic_lr=3e-3"),
    *("objective.sampling_levels=lcm", "~distill.teacher_steps", "logger.log_interval=3"),
)
MADE = ("student_mean", "student_std", "data_mean", "data_std")


def a_run(save: Path | None, *keys: str) -> RunConfig:
    place = () if save is None else (f"checkpoint.save={save}",)
    return load_config(tiny_run(num_layers=1), overrides=[*KEYS, *DMD, *place, *keys])


@pytest.fixture(scope="module")
def trained(groups, tmp_path_factory) -> Path:
    """A run of two steps without distillation."""
    folder = tmp_path_factory.mktemp("critic") / "teacher"
    plain = [key for key in KEYS if not key.startswith("distill")]
    config = load_config(
        tiny_run(num_layers=1),
        overrides=[*plain, f"checkpoint.save={folder}", "train.train_iters=2"],
    )
    assert pretrain(config) == 0
    return folder


def stored(run: Path, step: int) -> dict[str, Tensor]:
    found = dist_checkpointing.load_plain_tensors(str(run / f"checkpoints/step_{step:08d}"))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(
    ("adapted", "alone", "steps"),
    [(True, False, (1, 2, 3)), (True, True, (3,)), (False, False, (2,))],
    ids=["adapters", "critic alone", "whole"],
)
def test_a_run_goes_on_bit_for_bit_from_any_step_of_the_cycle(
    trained: Path, adapted: bool, alone: bool, steps: tuple[int, ...], tmp_path: Path
) -> None:
    keys = ("train.train_iters=6", "checkpoint.save_interval=1", "checkpoint.keep_last=0")
    keys += ("distill.critic_alone=true",) if alone else ()
    keys += ("lora.rank=2",) if adapted else (f"distill.teacher={trained}",)
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true")
    assert pretrain(a_run(tmp_path / "whole", *keys, *start)) == 0
    lines, last = metrics(tmp_path / "whole"), stored(tmp_path / "whole", 6)
    for line in lines:
        due = line["step"] % 3 == 0
        assert ("loss" in line, "critic_loss" in line) == (due, not (due and alone))
        assert all((name in line) == due for name in (*MADE, "weight_norm"))
        if not (due and alone):
            assert line["critic_lr"] == pytest.approx(
                3e-3 * line["lr"] / 1e-2 if due else 3e-3, rel=1
            )
    assert any(name.startswith("critic.optimizer.") for name in last)
    weights = {name for name in last if ".optimizer." not in name and name.startswith("critic.")}
    assert weights and all(is_adapter(name) == adapted for name in weights)
    assert not any(name.startswith("critic.ema.") for name in last)
    for step in steps:
        other = tmp_path / f"from_{step}"
        load = f"checkpoint.load={tmp_path}/whole/checkpoints/step_{step:08d}"
        assert pretrain(a_run(other, *keys, load)) == 0
        assert _learned(metrics(other)) == _learned(lines)[step:]
        again = stored(other, 6)
        assert again.keys() == last.keys()
        assert all(torch.equal(again[name], last[name]) for name in last)


def _learned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the lines say of the networks."""
    ends = ("loss", "grad_norm", "lr", "step", *MADE)
    return [{k: v for k, v in line.items() if k.endswith(ends)} for line in lines]


def test_a_critic_begins_as_the_teacher(trained: Path) -> None:
    """Whole or as adapters: a student that is the teacher then has no gradient at all."""
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true", "checkpoint.save=elsewhere")
    keys = ("distill.student_every=1", "distill.critic_lr=1e-30", *start)
    for own in ("lora.rank=2",), (f"distill.teacher={trained}", "distill.teacher_weights=model"):
        told: Any = {"read_folder": read_folder}
        config = a_run(None, *keys, *own)
        (step,) = measure_steps(config, warm_up=0, steps=1, around=nullcontext(), **told)
        assert step["loss"] == pytest.approx(0, abs=1e-9) and step["critic_loss"] > 0.01


def test_a_checkpoint_is_read_without_its_critic(trained: Path, tmp_path: Path) -> None:
    """As a run that takes its weights alone does, and exports: the student's names are plain."""
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true")
    keys = ("train.train_iters=2", f"distill.teacher={trained}", *start)
    assert pretrain(a_run(tmp_path / "student", *keys)) == 0
    names = tensor_names(tmp_path / "student/checkpoints/step_00000002")
    own = {name for name in names if not name.startswith("critic.")}
    assert own == {*tensor_names(trained / "checkpoints/step_00000002")}
    plain = [key for key in KEYS if not key.startswith("distill")]
    start = (f"checkpoint.load={tmp_path}/student", "checkpoint.finetune=true")
    config = load_config(
        tiny_run(num_layers=1),
        overrides=[*plain, *start, f"checkpoint.save={tmp_path}/next", "train.train_iters=1"],
    )
    assert pretrain(config) == 0
