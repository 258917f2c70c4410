"""Runs that start from a Diffusers folder: on every layout, and gone on with without the folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.entering import Enter
from tests.families.dit import PROJECTED, publish, random_model
from tests.families.wan import publish_wan, random_wan
from tests.launching import ROOT, metrics, numbers, run

QUICK = (
    *("--recipe", "dit_debug", "train.train_iters=4", "checkpoint.save_interval=2"),
    *("train.eval_interval=2", "train.eval_iters=1", "train.global_batch_size=2"),
    *("logger.log_interval=1", "model.text_pad_to=64", "dataset.num_workers=0"),
)
POSITIONS = {"extra_pos_embed_type": "learnable", "max_size": (8, 40, 40)}


@pytest.fixture(scope="module")
def filled(once) -> Path:
    return once("filled", _fill)


def _fill(folder: Path) -> None:
    cosmos = random_model(num_layers=4, **POSITIONS, concat_padding_mask=True, **PROJECTED)
    publish(folder / "cosmos.hf", cosmos, max_shard_size="60KB")
    publish_wan(folder / "wan.hf", random_wan(num_layers=4).bfloat16())
    worker = ROOT / "tests/distributed/load_hf_worker.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = run([sys.executable, *launcher, str(worker), str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_rank_gets_its_parts_of_the_weights(filled):
    found = json.loads((filled / "found.json").read_text())
    wrong = {name: names for name, (names, _) in _layouts(found).items() if names}
    assert len(_layouts(found)) == 10 and not wrong


@pytest.mark.slow
def test_ranks_with_the_same_parts_share_the_reading(filled):
    """Tensor ranks alone read some numbers twice: queries, keys, values, and what all have."""
    found = json.loads((filled / "found.json").read_text())
    for kind in ("cosmos", "wan"):
        whole = _numbers(filled / f"{kind}.hf")
        for layout in ("dp4", "pp2+vpp2, dp2"):
            _, read = found[f"{kind} {layout}"]
            assert read == whole, layout
        _, read = found[f"{kind} tp4"]
        assert whole < read < 3 * whole


@pytest.mark.slow
def test_ranks_share_the_digests(filled):
    found = json.loads((filled / "found.json").read_text())
    for kind in ("cosmos", "wan"):
        folder = filled / f"{kind}.hf"
        digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
        files = found[f"{kind} origin"]["files"]
        assert {name: entry["sha256"] for name, entry in files.items()} == digests


def _layouts(found: dict) -> dict:
    return {name: value for name, value in found.items() if not name.endswith("origin")}


def _numbers(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            total += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
    return total


@pytest.mark.slow
def test_a_run_starts_from_a_folder_and_goes_on_without_it(enter: Enter, tmp_path: Path) -> None:
    """The numbers are those of an import that is fine-tuned; the folder is read once."""
    hf = publish_wan(tmp_path / "hf", random_wan())
    start = ("--mock", *QUICK, f"checkpoint.load_hf={hf}")

    def train(folder: str, *words: str):
        done = enter("pretrain_dit", *words, f"checkpoint.save={tmp_path / folder}")
        assert done.code == 0, done.said
        return done.said

    said = train("whole", *start)
    assert f"starting at step 0 from the weights of {hf}" in said
    assert f"other than {hf} says: model.text_pad_to=64 here and 512 there" in said
    train("parts", *start, "train.train_iters=2", "scheduler.lr_decay_iters=4")
    origin = (tmp_path / "parts/checkpoints/step_00000002/origin.json").read_text()
    assert json.loads(origin)["path"] == str(hf)
    hf.rename(tmp_path / "moved")
    assert "continuing after step 2" in train("parts", *start, "scheduler.lr_decay_iters=4")
    assert (tmp_path / "parts/checkpoints/step_00000004/origin.json").read_text() == origin
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    done = enter("pretrain_dit", *start, f"checkpoint.save={tmp_path / 'new'}")
    assert done.code == 1 and f"checkpoint.load_hf {hf} has neither" in done.error()


@pytest.mark.slow
def test_its_losses_are_those_of_an_import(enter: Enter, tmp_path: Path) -> None:
    hf = publish(tmp_path / "hf", random_model())
    words = ("--mock", *QUICK, "train.train_iters=2")
    done = enter(
        "pretrain_dit", *words, f"checkpoint.load_hf={hf}", f"checkpoint.save={tmp_path / 'a'}"
    )
    assert done.code == 0, done.said
    ours, config = tmp_path / "ours", tmp_path / "config.yaml"
    convert = [sys.executable, "-m", "dit.convert", "import", "--hf-path", str(hf)]
    done = run([*convert, "--megatron-path", str(ours), "--text-pad-to", "64"])
    assert done.returncode == 0, done.stderr
    shutil.copyfile(tmp_path / "a" / "config.yaml", config)
    done = enter(
        *("pretrain_dit", "--config-file", config, "checkpoint.load_hf=null"),
        *(f"checkpoint.load={ours}", "checkpoint.finetune=true"),
        f"checkpoint.save={tmp_path / 'b'}",
    )
    assert done.code == 0, done.said
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert len(metrics(tmp_path / "a")) == 2
