"""The critic of DMD in a run: its checkpoint, a resume at any step of its cycle, its files."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from dit.config import LoraConfig, RunConfig, Sharding, Weights
from dit.config_loading import ConfigError, load_config
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.lora import export_lora
from dit.convert.verify import compare_tensors
from dit.device_specs import DEVICES
from dit.distcp import tensor_names
from dit.models.layers.adaptable import is_adapter
from dit.sizing.describe import describe
from dit.sizing.memory import critic_bytes, memory, parameter_count, weight_bytes
from dit.sizing.recomputation import USABLE, choose_recomputation
from dit.train.opening.checks import check_start
from dit.train.optimizer.update import learning_rate
from dit.train.trainer import measure_steps, pretrain
from recipes.runs import dit_debug, read_folder
from tests.launching import metrics
from tests.learning import tiny_run
from tests.unit.train.test_teacher import KEYS

DMD = (
    *("distill.method=dmd", "distill.student_every=3", "distill.critic_lr=3e-3"),
    *("objective.sampling_levels=lcm", "~distill.teacher_steps", "logger.log_interval=3"),
)
OWN = ("distill.critic_ema_decay=0.5", "distill.critic_lr_decay_style=constant")
OWN += ("distill.critic_lr_warmup_iters=2",)
"""Of the critic alone: its average and its schedule."""
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
    averaged = not alone  # and the schedule is its own
    keys += OWN if averaged else ()
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true")
    assert pretrain(a_run(tmp_path / "whole", *keys, *start)) == 0
    lines, last = metrics(tmp_path / "whole"), stored(tmp_path / "whole", 6)
    for line in lines:
        due = line["step"] % 3 == 0
        assert ("loss" in line, "critic_loss" in line) == (due, not (due and alone))
        assert all((name in line) == due for name in (*MADE, "weight_norm"))
        if averaged:
            assert line["critic_lr"] == pytest.approx(3e-3 * min(1, line["step"] / 2))
        elif not due:
            assert 1e-3 < line["critic_lr"] < 3e-3  # the student's cosine, at its own rate
    assert any(name.startswith("critic.optimizer.") for name in last)
    weights = {name for name in last if name.startswith("critic.")}
    weights = {name for name in weights if ".optimizer." not in name and ".ema." not in name}
    assert weights and all(is_adapter(name) == adapted for name in weights)
    averages = {name for name in last if name.startswith("critic.ema.")}
    assert averages == {name.replace("critic.", "critic.ema.") for name in weights if averaged}
    assert all(not torch.equal(last[n], last[n.replace(".ema", "")]) for n in averages)
    for step in steps:
        other = tmp_path / f"from_{step}"
        load = f"checkpoint.load={tmp_path}/whole/checkpoints/step_{step:08d}"
        assert pretrain(a_run(other, *keys, load)) == 0
        assert _learned(metrics(other)) == _learned(lines)[step:]
        again = stored(other, 6)
        assert again.keys() == last.keys()
        assert all(torch.equal(again[name], last[name]) for name in last)


@pytest.mark.parametrize(
    ("key", "rate"),
    [
        ("distill.critic_lr=1e-3", 1e-3 / 3),
        ("distill.critic_lr=null", 1e-2 / 3),
        ("distill.critic_lr_warmup_iters=4", 3e-3 / 4),
        ("distill.critic_lr_warmup_iters=0", 3e-3 * (1 + math.cos(math.pi / 6)) / 2),
        ("scheduler.lr_decay_style=linear", 3e-3 / 3),
    ],
)
def test_a_critic_has_a_schedule_of_its_own(key: str, rate: float) -> None:
    """After its first update; where it says nothing, that of the student, of 6 updates."""
    base = ("lora.rank=2", "distill.critic_lr_warmup_iters=3", "scheduler.lr_decay_iters=6")
    config = a_run(None, *base, key)
    assert learning_rate(config.of_critic, 1) == pytest.approx(rate)
    constant = a_run(None, *base, key, "distill.critic_lr_decay_style=constant").of_critic
    assert learning_rate(constant, 6) == pytest.approx(constant.optimizer.lr)
    assert learning_rate(config.of_critic, 6) < constant.optimizer.lr / 2


def test_a_warm_up_of_the_critic_lasts_less_than_the_run() -> None:
    with pytest.raises(ConfigError, match="critic_lr_warmup_iters=10 must lie below the decay"):
        a_run(None, "lora.rank=2", "distill.critic_lr_warmup_iters=10")


def test_an_average_begins_where_a_run_goes_on_without_one(trained: Path, tmp_path: Path) -> None:
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true", "lora.rank=2")
    assert pretrain(a_run(tmp_path / "run", *start, "train.train_iters=2")) == 0
    keys = ("lora.rank=2", "train.train_iters=3", "distill.critic_ema_decay=0.5")
    assert pretrain(a_run(tmp_path / "run", *keys)) == 0
    (before, last) = (stored(tmp_path / "run", step) for step in (2, 3))
    for name in (name for name in last if name.startswith("critic.ema.")):
        weight = name.replace(".ema", "")
        middle = (before[weight] + last[weight]) / 2
        torch.testing.assert_close(last[name], middle, rtol=1e-5, atol=1e-7)


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


@pytest.fixture(scope="module", params=["adapters", "whole"])
def distilled(request, trained: Path, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """A run of three steps with a critic, and what a new one beside the same teacher sets."""
    folder = tmp_path_factory.mktemp("distilled") / "run"
    start = (f"checkpoint.load={trained}", "checkpoint.finetune=true")
    start += ("lora.rank=2",) if request.param == "adapters" else (f"distill.teacher={trained}",)
    assert pretrain(a_run(folder, *start, "train.train_iters=3", *OWN)) == 0
    return folder, start


def test_student_and_critic_are_written_to_files_of_their_own(distilled, tmp_path: Path) -> None:
    """And a critic begins with its file, or with the run folder."""
    run, start = distilled
    adapted = "lora.rank=2" in start
    told: Any = {"weights": Weights.MODEL}
    files = {critic: tmp_path / f"critic_{critic}" for critic in (False, True)}
    for critic, folder in files.items():
        if adapted:
            export_lora(run, folder, critic=critic, **told)
        else:
            export_weights(run, folder, ExportOptions(critic=critic, **told))
    kind = "adapter_model.safetensors" if adapted else "diffusion_pytorch_model.safetensors"
    bits = [(folder / kind).read_bytes() for folder in files.values()]
    assert bits[0] != bits[1]
    cards = [(folder / "README.md").read_text() for folder in files.values()]
    assert ["Distilled for: 2 steps of lcm" in card for card in cards] == [True, False]
    if not adapted:
        assert compare_tensors(files[False], run, Weights.MODEL)[0].different == 0
    last = stored(run, 3)
    still = ("train.train_iters=1", "distill.critic_lr=1e-30", *start)
    for number, place in enumerate((files[True], run)):
        config = a_run(tmp_path / str(number), *still, f"distill.critic_load={place}")
        told = {"read_folder": read_folder}
        check_start(config, world_size=1, **told)
        assert pretrain(config, **told) == 0
        found = stored(tmp_path / str(number), 1)
        names = [n for n in found if n.startswith("critic.") and ".optimizer." not in n]
        for name in names:
            torch.testing.assert_close(found[name], last[name], rtol=1e-6, atol=1e-7)
        assert names


def test_a_critic_that_does_not_fit_is_refused_by_a_dry_run_as_well(
    distilled, tmp_path: Path
) -> None:
    run, start = distilled
    wrong = {tmp_path / "none": "none"}
    told: Any = {"read_folder": read_folder}
    keys = [key for key in start if key != "lora.rank=2"]
    if len(keys) < len(start):
        keys.append("lora.rank=3")
        wrong[run] = "other adapters than those that the student"
    for place, said in wrong.items():
        config = a_run(tmp_path / "new", *keys, f"distill.critic_load={place}")
        with pytest.raises(ValueError, match=said):
            check_start(config, world_size=1, **told)
        with pytest.raises(ValueError, match=said):
            pretrain(config, **told)


def test_a_run_without_critic_exports_none(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="holds no critic"):
        export_weights(trained, tmp_path / "none", ExportOptions(critic=True))


def test_the_memory_of_a_critic_counts() -> None:
    """Weights, gradients, optimizer and average: twice those of a network, or of adapters."""
    keys = ("distill.teacher=elsewhere", *OWN)
    alone = [key for key in KEYS if not key.startswith("distill")]
    plain = load_config(tiny_run(num_layers=1), overrides=alone)
    both, once = memory(a_run(None, *keys), world_size=1), memory(plain, world_size=1)
    assert both.weights == 3 * once.weights  # with the teacher
    parts = ("gradients", "optimizer", "ema")
    assert [getattr(both, p) for p in parts] == [2 * getattr(once, p) for p in parts]
    assert memory(a_run(None, keys[0]), world_size=1).ema == once.ema
    adapted, single = a_run(None, "lora.rank=2"), replace(plain, lora=LoraConfig(rank=2))
    more = memory(adapted, world_size=1).weights - memory(single, world_size=1).weights
    assert more == memory(single, world_size=1).gradients  # of float32, as the adapters
    shares = replace(adapted, ddp=replace(adapted.ddp, sharding=Sharding.WEIGHTS))
    assert critic_bytes(shares) == weight_bytes(shares)  # with a base of its own
    assert critic_bytes(single) == 0


def test_twelve_billion_weights_with_two_adapters_fit_one_gpu_of_80_gb(repo_root: Path) -> None:
    """And the average of the student's."""
    keys = ("lora.rank=64", "distill.method=dmd", "objective.sampling_levels=lcm")
    keys += ("dataset.mock=true", "ema.kind=constant", "~objective.cfg_target")
    file = repo_root / "conf/flux_schnell_lora.yaml"
    config = load_config(dit_debug(), config_file=file, overrides=keys)
    device = DEVICES["h100"].memory
    chosen = choose_recomputation(config, world_size=1, device_memory=device).config
    assert parameter_count(config.model) > 11e9 and device <= 80 * 2**30
    assert 24e9 < memory(chosen, world_size=1).total < USABLE * device
    assert "# critic" in describe(config, world_size=1)
