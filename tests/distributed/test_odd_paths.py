"""Every command says paths unchanged in which rich, shells or formats see more than letters."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from PIL import Image

from tests.entering import Enter
from tests.launching import ROOT, SMALL

ODD = "data:ok:1 [bold]x[/bold] :warning: {0} 9%s é 'a'"
PREP, CONVERT, REPORT = "data_prep.cli.parser", "dit.convert.cli", "dit.report.__main__"
COMMANDS = {
    "pretrain_dit": ["--config-file", "{}.yaml"],
    "pretrain_dit dataset": ["--dry-run", "dataset.path={}"],
    "plan_run": ["--gpus", "1", "--config-file", "{}.yaml"],
    "check_layouts": ["--config-file", "{}.yaml"],
    "generate_dit": ["--checkpoint_path", "{}", "--output_dir", "out", "--prompt", "x"],
    "evaluate_digits": ["--checkpoint_path", "{}"],
    "evaluate_pictures": ["--checkpoint_path", "{}"],
    "compare_trainings": ["--config_file", "{}.yaml", "--output", "out", "--variant", "plain"],
    "fit_run": ["{}"],
    "decode_latents": ["--latents", "{}", "--output_dir", "out"],
    f"{PREP} image": ["image", "--image_dir", "{}", "--output_dir", "out"],
    f"{PREP} video": ["video", "--video_dir", "{}", "--output_dir", "out"],
    f"{PREP} masks": ["image", "--mask_dir", "{}", "--output_dir", "out"],
    f"{PREP} file": ["image", "--dataset_config", "{}.yaml", "--output_dir", "out"],
    f"{PREP} convert": ["convert", "{}", "--output_dir", "out"],
    f"{PREP} relocate": ["relocate", "{}"],
    f"{PREP} inspect": ["inspect", "{}"],
    f"{CONVERT} import": ["import", "--hf-path", "{}", "--megatron-path", "out"],
    f"{CONVERT} export": ["export", "--megatron-path", "{}", "--hf-path", "out"],
    f"{CONVERT} verify": ["verify", "--megatron-path", "{}", "--hf-path", "out"],
    f"{CONVERT} import-lora": [
        "import-lora",
        "--hf-path",
        "out",
        "--base-path",
        "{}",
        "--megatron-path",
        "out",
    ],
    REPORT: ["{}"],
    "dit.playground.__main__": ["{}", "--port", "0"],
}
"""Each command, told of a path where nothing is."""


def test_the_list_has_every_script() -> None:
    scripts = {path.stem for path in (ROOT / "recipes").glob("*.py")} - {"__init__", "runs"}
    scripts -= {"rehearsal_encoders"}  # which makes the path that it is told of
    assert scripts <= {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_names_the_path_unchanged(enter: Enter, tmp_path: Path, command: str) -> None:
    words = [word.replace("{}", str(tmp_path / ODD)) for word in COMMANDS[command]]
    done = enter(command.split()[0], *words)
    assert done.code == 1, done.said
    assert str(tmp_path / ODD) in done.said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an odd path, and pictures with odd names in it."""
    folder = tmp_path_factory.mktemp("odd") / ODD
    (folder / "media").mkdir(parents=True)
    for name in (":ok:", "[red]x"):
        Image.new("RGB", (32, 32)).save(folder / "media" / f"{name}.png")
    (folder / "media" / ":warning:.txt").write_text("a caption of no picture")
    return folder


@pytest.mark.slow
def test_every_command_of_a_first_run_says_its_paths_unchanged(enter: Enter, place: Path) -> None:
    def say(command: str, *words: object) -> str:
        done = enter(command, *words)
        assert done.code == 0, done.said
        return done.said

    shards, run, out = place / "shards", place / "run", place / "out"
    media = ("image", "--image_dir", place / "media", "--processor", "pixel", "--num_workers", 0)
    media += ("--minutes", 0)  # no run is fitted to them
    plan = say(PREP, *media, "--output_dir", place / "plan", "--plan")
    assert f"each file: {place}/plan/plan.jsonl, with pictures: {place}/plan/plan.html" in plan
    packed = say(PREP, *media, "--output_dir", place / "packed")
    assert f"bytes in the shards of {place}/packed\n" in packed
    assert "the first :warning:.txt\n" in packed
    digits = say(PREP, "digits", "--num_samples", 40, "--output_dir", shards, "--split", "1,0,0")
    typed = shlex.split(digits.splitlines()[-1])
    assert f"dataset.path={json.dumps(str(shards), ensure_ascii=False)}" in typed
    assert f"samples in 1 shard of {shards}\n" in say(PREP, "inspect", shards)

    keys = [
        *SMALL,
        "scheduler.lr_warmup_iters=1",
        "train.train_iters=2",
        "train.global_batch_size=2",
        "dataset.num_workers=0",
    ]
    start = typed.index("--config-file")
    trained = say("pretrain_dit", *typed[start:], *keys, f"checkpoint.save={json.dumps(str(run))}")
    assert f"saved {run}/checkpoints/step_00000002 in " in trained
    following = [shlex.split(line) for line in trained.splitlines() if " -m " in line]
    assert all(str(run) in words for words in following) and len(following) == 3

    asked = ("--prompt", ODD, "--num_steps", 2, "--output_dir", out, "--save_latents")
    assert f" in {out}\n" in say("generate_dit", "--checkpoint_path", run, *asked)
    decoded = say("decode_latents", "--latents", out, "--output_dir", place / "decoded")
    assert f" in {place}/decoded\n" in decoded
    assert str(run / "report.html") in say(REPORT, run)
    exported = say(CONVERT, "export", "--megatron-path", run, "--hf-path", place / "hf")
    assert str(place / "hf") in exported
    imported = say(CONVERT, "import", "--hf-path", place / "hf", "--megatron-path", place / "new")
    assert str(place / "new") in imported
