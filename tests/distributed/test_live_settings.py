"""Keys that may change at a resume: what the run then says and writes.

They change together in a few resumes, and each has a check of its own. The others are in
`test_live_numbers.py` and `test_live_builds.py`; no live key is without a check.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from dit.config.resume import Resume
from dit.config_loading.load import default_config
from dit.config_loading.schema import Schema, schema_of
from dit.models.registry import families
from tests.launching import ROOT, SMALL, command, metrics, run
from tests.shard_edits import edited
from tests.unit.train import test_live_builds as builds
from tests.unit.train import test_live_numbers as steps

CONF = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL)
FIRST = (
    *("dataset.num_workers=0", "train.train_iters=2", "checkpoint.save_interval=2"),
    *("train.eval_interval=1", "train.eval_iters=1", "checkpoint.keep_last=0"),
    *("scheduler.lr_warmup_iters=0", "scheduler.lr_decay_iters=9", "model.num_layers=4"),
)
"""Of the run that is continued."""


@dataclass(frozen=True)
class Seen:
    """What a resume has said and written."""

    said: str
    folder: Path
    lines: list[dict]  # of metrics.jsonl

    def file(self, name: str) -> Path:
        return self.folder / name

    @property
    def samples(self) -> list[dict]:
        """Of step 6; the first is that of the prompt."""
        listing = self.file("validation_generation/step_00000006/samples.json")
        return json.loads(listing.read_text())

    @property
    def saved(self) -> list[str]:
        return sorted(path.name[-1] for path in self.file("checkpoints").glob("step_*"))


class Corners(nn.Module):
    """A network that sees how bright the four corners are."""

    def forward(self, pixels_N3HW: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(pixels_N3HW.float(), 2)[:, 0].flatten(1)


Checks = Mapping[str, tuple[object, Callable[[Seen], object]]]
"""Key -> its value in the resume, and whether it has had its effect."""


def _long(digits: Path, root: Path) -> Checks:
    """Of steps 3 to 6, in the same folder."""
    prompts, features = root / "prompts.txt", root / "features.pt"
    again = f"[{{name: again, path: {digits}}}]"
    return {
        "model.name": ("dit_s", lambda s: "\ndit dit_s: " in s.said),
        "train.train_iters": (6, lambda s: "done after step 6" in s.said),
        "train.global_batch_size": (2, lambda s: s.lines[5]["consumed_samples"] == 32 + 4 * 32),
        "train.eval_interval": (
            3,
            lambda s: "val_loss" in s.lines[2] and "val_loss" not in s.lines[3],
        ),
        "dataset.num_workers": (2, lambda s: "2 readers" in s.said),
        "dataset.use_train_split_for_val": (
            "true",
            lambda s: s.lines[5]["val_loss"] != s.lines[5]["val_again_loss"],
        ),
        "validation.quantiles": (2, lambda s: "val_loss_q25" in s.lines[5]),
        "validation.sets": (again, lambda s: "val_again_loss" in s.lines[5]),
        "validation.prompts_file": (prompts, lambda s: s.samples[0]["prompt"] == "a small seven"),
        "validation.num_captions": (2, lambda s: len(s.samples) == 3),
        "validation.negative_prompt": ("one", lambda s: s.samples[0]["negative_prompt"] == "one"),
        "validation.height": (16, lambda s: s.samples[0]["height"] == 16),
        "validation.width": (24, lambda s: s.samples[0]["width"] == 24),
        "validation.num_video_frames": (3, lambda s: s.samples[0]["num_video_frames"] == 3),
        "validation.fps": (12, lambda s: s.samples[0]["fps"] == 12),
        "validation.sample_seed": (5, lambda s: s.samples[0]["seed"] == 5),
        "validation.feature_extractor": (features, lambda s: "val_fid" in s.lines[5]),
        "checkpoint.save_interval": (1, lambda s: "step_00000005" in s.said),
        "checkpoint.keep_last": (1, lambda s: len(s.saved) <= 2 and s.saved[-1] == "6"),
        "checkpoint.async_save": ("true", lambda s: "writing in the background" in s.said),
        "checkpoint.also_save_hf": ("true", lambda s: [*s.file("diffusers").glob("*/config.json")]),
        "logger.log_interval": (5, lambda s: "\nstep 5/6" in s.said and "\nstep 4/6" not in s.said),
        "logger.tensorboard_dir": (root / "board", lambda s: [*(root / "board").iterdir()]),
        "logger.price_per_gpu_hour": (7, lambda s: "at logger.price_per_gpu_hour=7" in s.said),
        "validation.target": (1e-3, lambda s: "target: 0.001" in s.file("config.yaml").read_text()),
        "logger.mlperf_division": (
            "open",
            lambda s: "eval_accuracy" in s.file("mlperf.log").read_text(),
        ),
        "logger.watts_per_gpu": (700, lambda s: "kWh at logger.watts_per_gpu=700" in s.said),
    }


def _elsewhere(broken: Path, root: Path) -> Checks:
    """In another folder, with data of which half cannot be used, and without validation."""
    return {
        "checkpoint.save": (root / "elsewhere", lambda s: [line["step"] for line in s.lines]),
        "checkpoint.load_data_position": ("false", lambda s: "the data begin anew" in s.said),
        "train.epochs": (0.2, lambda s: "done after step 3" in s.said),
        "train.eval_iters": (0, lambda s: not any("val_loss" in line for line in s.lines)),
        "dataset.max_bad_fraction": (0.9, lambda s: "refused samples" in s.said),
    }


LAYOUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            *("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
            *("model.context_parallel_size=2", "model.cp_comm_type=all_gather"),
        ),
        "(tensor 2, sequence parallel, context 2 all_gather, data 1)",
    ),
    (
        (
            *("model.pipeline_model_parallel_size=2", "ddp.dp_replicate_size=2"),
            "model.virtual_pipeline_model_parallel_size=2",
        ),
        "(pipeline 2, 2 virtual stages, data 2, 2 copies of the optimizer state)",
    ),
    (
        (
            *("ddp.sharding=weights", "ddp.dp_replicate_size=2", "ddp.reduce_each_pack=false"),
            *("ddp.reshard_after_forward=false", "ddp.prefetch_layers=2"),
        ),
        "(data 4, 2 copies of the optimizer state, weights in shares, gradients summed once a step,"
        " layers kept gathered, 2 layers fetched ahead)",
    ),
)
"""Of four processes, and what the log then says of the layout."""


@pytest.fixture(scope="module")
def first(enter, digits, tmp_path_factory) -> Path:
    """A run of two steps, to be copied."""
    folder = tmp_path_factory.mktemp("first") / "run"
    done = enter(
        "pretrain_dit", *CONF, *FIRST, f"dataset.path={digits}", f"checkpoint.save={folder}"
    )
    assert done.code == 0, done.said
    return folder


def _tokens(checks: Checks) -> list[str]:
    return [
        f"{key}={str(v).lower() if v in (True, False) else v}" for key, (v, _) in checks.items()
    ]


def _check(checks: Checks, seen: Seen) -> None:
    missed = [key for key, (_, has_effect) in checks.items() if not has_effect(seen)]
    assert not missed, f"{missed}\n{seen.said}"


@pytest.mark.slow
def test_each_key_changes_what_is_said_and_written(enter, first, digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(first, folder)
    (tmp_path / "prompts.txt").write_text("a small seven")
    torch.jit.script(Corners()).save(str(tmp_path / "features.pt"))
    checks = _long(digits, tmp_path)
    more = ("validation.sampling_steps=1", f"dataset.path={digits}", f"checkpoint.save={folder}")
    done = enter("pretrain_dit", *CONF, *FIRST, *more, *_tokens(checks))
    assert done.code == 0, done.said
    _check(checks, Seen(done.said, folder, metrics(folder)))


def test_each_key_changes_what_another_folder_gets(enter, first, digits, tmp_path):
    def broken(tensors):
        return tensors | {"latent": torch.full_like(tensors["latent"], torch.nan)}

    data = edited(digits, tmp_path / "broken", broken, count=100)
    checks = _elsewhere(data, tmp_path)
    more = (f"dataset.path={data}", f"checkpoint.load={first}")
    done = enter("pretrain_dit", *CONF, *FIRST, *more, *_tokens(checks))
    assert done.code == 0, done.said
    folder = tmp_path / "elsewhere"
    _check(checks, Seen(done.said, folder, metrics(folder)))


def test_as_many_skipped_steps_are_allowed_as_the_new_setting_says(enter, first, digits, tmp_path):
    def overflow(tensors):  # finite, and its square is not
        return tensors | {"latent": torch.full_like(tensors["latent"], 3e38, dtype=torch.bfloat16)}

    data = edited(digits, tmp_path / "huge", overflow, count=215)
    more = (f"dataset.path={data}", f"checkpoint.load={first}", "train.max_skipped_steps=1")
    done = enter(
        "pretrain_dit", *CONF, *FIRST, *more, "train.train_iters=9", "checkpoint.save=null"
    )
    assert "1 steps in a row were skipped, as many as train.max_skipped" in done.error()


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "said"), LAYOUTS)
def test_each_key_of_the_layout_is_one_of_the_new_run(first, digits, tokens, said):
    more = (f"dataset.path={digits}", f"checkpoint.load={first}", "checkpoint.save=null")
    more += ("train.train_iters=3", "train.global_batch_size=4", "train.eval_interval=0")
    done = run(command("pretrain_dit.py", *CONF, *FIRST, *more, *tokens, nproc=4))
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout and "continuing after step 2" in done.stdout


def _keys(tokens: Iterable[str]) -> set[str]:
    return {token.partition("=")[0] for token in tokens}


def test_every_live_key_has_a_check():
    checked = {*_long(Path(), Path()), *_elsewhere(Path(), Path()), "train.max_skipped_steps"}
    checked |= {"model.attention_backend"}  # test_attention_backend.py
    checked |= {"checkpoint.mirror"}  # test_mirror.py
    checked |= {"validation.reference_guidance"}  # test_reference_guidance.py
    checked |= {"validation.fixed_levels"}  # test_mlperf_digits.py
    checked |= {
        "validation.text_dropout",
        "validation.latents",
    }  # test_validation.py, test_drawn_latents.py
    checked |= {"logger.mlperf_org"}  # test_mlperf_log.py
    checked |= {"distill.teacher"}  # test_teacher.py: another place of the same folder
    checked |= {f"distill.critic_{key}" for key in ("lr", "ema_decay")}  # test_critic.py
    checked |= {f"distill.critic_lr_{key}" for key in ("decay_style", "warmup_iters")}
    checked |= {"distill.gan_weight"}  # has one value
    checked |= {"lora.frozen_adapter"}  # test_frozen_adapter.py: another place of the same file
    checked |= {"model.cross_levels"}  # test_ltx2.py
    for tokens, _ in LAYOUTS:
        checked |= _keys(tokens)
    for table in (steps.WEIGHTS, steps.AVERAGES, steps.SAMPLES):
        for tokens in table.values():
            checked |= _keys(tokens)
    for tokens in (builds.ENGINE, builds.COMPUTED, builds.SWAPPED, builds.PROCESS):
        checked |= _keys(tokens)
    checked |= _keys((*builds.PLACES, *builds.COLLECTED, *builds.READ))
    checked |= {key for tokens in builds.MEMORY for key in _keys(tokens)}
    schemas = [schema_of(default_config()), *(Schema(one.config) for one in families())]
    live = {key for s in schemas for key in s.all_keys() if s.resume_class(key) is Resume.LIVE}
    assert checked == live
