"""Runs of adapters beside a Diffusers folder: other layouts, what is stored, a base that moved."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from diffusers import WanTransformer3DModel

from dit.convert.diffusers_checkpoint import open_folder
from dit.convert.lora import open_adapters
from dit.convert.megatron_checkpoint import StoredWeights
from dit.lora.files import write_lora
from tests.families.wan import publish_wan, random_wan
from tests.launching import command, metrics, run
from tests.lora_files import linears, random_factors

SETTINGS = (
    *("--recipe", "dit_debug", "--mock", "checkpoint.save_interval=2", "train.eval_interval=0"),
    *("train.global_batch_size=2", "logger.log_interval=1", "dataset.num_workers=0"),
    *(
        "model.text_pad_to=64",
        "model.precision=fp32",
        "lora.rank=3",
        "lora.dropout=0.1",
        "optimizer.lr=1e-3",
    ),
)
PAIRS = ("objective.preference=dpo", "objective.dpo_beta=1", "dataset.task_encoder_seq_length=1024")
TWO = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")


def _train(folder: Path, base: Path, *more: str, nproc: int = 1) -> CompletedProcess[str]:
    places = (f"checkpoint.save={folder}", f"checkpoint.load_hf={base}")
    return run(command("pretrain_dit.py", *SETTINGS, *places, *more, nproc=nproc))


@pytest.fixture(scope="module")
def runs(once) -> Path:
    """`two`: 4 steps on two tensor ranks; `one`: its step 2, gone on with on one.

    Both learn from pairs, beside a frozen adapter.
    """
    return once("adapters", _train_both)


def _train_both(folder: Path) -> None:
    network = random_wan(num_layers=2)
    base = publish_wan(folder / "base", network)
    beside = (f"lora.frozen_adapter={folder / 'beside'}", *PAIRS)
    (folder / "beside").mkdir()
    write_lora(folder / "beside", random_factors(linears(network)))
    for steps in ("2", "4"):
        done = _train(folder / "two", base, *TWO, f"train.train_iters={steps}", *beside, nproc=2)
        assert done.returncode == 0, done.stdout + done.stderr
        if steps == "2":
            shutil.copytree(folder / "two", folder / "one")
    done = _train(folder / "one", base, "train.train_iters=4", *beside)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_another_layout_goes_on_with_the_same_steps(runs):
    two, one = ([line["loss"] for line in metrics(runs / name)] for name in ("two", "one"))
    assert one == pytest.approx(two, rel=1e-6) and len(set(two)) == 4


@pytest.mark.slow
def test_a_checkpoint_holds_what_is_trained_and_says_beside_what(runs):
    checkpoint = runs / "two/checkpoints/step_00000004"
    said = json.loads((checkpoint / "lora.json").read_text())
    assert said["base"]["diffusers"] and said["base"]["path"] == str(runs / "base")
    assert {tuple(shape.values()) for shape in said["adapters"].values()} == {(3, 3.0)}
    names = StoredWeights(checkpoint, averaged=False)._tensors()
    assert names and all(".lora." in name for name in names)
    trained = sum(entry.size.numel() for entry in names.values())
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))
    assert stored <= 20 * trained + 1e6
    assert len(said["adapters"]) == 2 * 10


@pytest.mark.slow
def test_an_export_is_what_was_trained(runs):
    hf = runs / "hf"
    paths = ("--megatron-path", str(runs / "two"), "--hf-path", str(hf))
    done = run([sys.executable, "-m", "dit.convert", "export-lora", *paths])
    assert done.returncode == 0, done.stdout + done.stderr
    merged = ("--megatron-path", str(runs / "two"), "--hf-path", str(runs / "merged"), "--merged")
    done = run([sys.executable, "-m", "dit.convert", "export", *merged])
    assert done.returncode == 0, done.stdout + done.stderr
    beside = WanTransformer3DModel.from_pretrained(runs / "base")
    beside.load_lora_adapter(str(hf), prefix="transformer", use_safetensors=True)
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 64, 16),
    }
    with torch.no_grad():
        whole = WanTransformer3DModel.from_pretrained(runs / "merged")
        wanted, got = whole(**inputs).sample, beside(**inputs).sample
        base = WanTransformer3DModel.from_pretrained(runs / "base")(**inputs).sample
    assert (got - wanted).abs().max() <= 1e-5 * wanted.square().mean().sqrt()
    assert (got - base).abs().max() > 1e-3 * wanted.square().mean().sqrt()


@pytest.mark.slow
def test_a_base_in_8_bits_whose_blocks_take_turns_goes_on_bit_for_bit(tmp_path):
    """It goes on from step 2. What is stored and merged knows nothing of 8 bits."""
    base = publish_wan(tmp_path / "base", random_wan(num_layers=4))
    first, again = tmp_path / "first", tmp_path / "again"
    keys = (*TWO, "train.train_iters=4", "lora.base_dtype=float8_e4m3")
    done = _train(first, base, *keys, "model.blocks_to_swap=2", nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(first, again)
    shutil.rmtree(again / "checkpoints/step_00000004")
    (again / "checkpoints/LATEST").write_text("step_00000002")
    done = _train(again, base, *keys, nproc=2)  # swapped or not
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing after step 2" in done.stdout + done.stderr
    ends = [folder / "checkpoints/step_00000004" for folder in (first, again)]
    one, two = (StoredWeights(end, averaged=False) for end in ends)
    assert one._tensors() and all(".lora." in name for name in one._tensors())
    assert all(torch.equal(one.read_whole(n), two.read_whole(n)) for n in one._tensors())
    origin = open_folder(base, option="base")
    sums = (hashlib.sha256((base / name).read_bytes()).hexdigest() for name in origin.files)
    listed = "".join(f"{d}  {name}\n" for d, name in zip(sums, origin.files, strict=True))
    for end in ends:
        said = json.loads((end / "lora.json").read_text())
        assert said["base"]["digest"] == hashlib.sha256(listed.encode()).hexdigest()
    merged = ("--megatron-path", str(again), "--hf-path", str(tmp_path / "merged"), "--merged")
    done = run([sys.executable, "-m", "dit.convert", "export", *merged])
    assert done.returncode == 0, done.stdout + done.stderr
    factors = open_adapters(again).factors["blocks.1.ffn.net.2"]
    name = "blocks.1.ffn.net.2.weight"
    whole = open_folder(tmp_path / "merged", option="merged")
    assert torch.equal(whole.read(name), origin.read(name) + factors.product())


@pytest.mark.slow
def test_a_base_that_moved_or_changed_is_named(runs, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(runs / "one", folder)
    shutil.copytree(runs / "base", moved)
    longer = ("train.train_iters=6", f"lora.frozen_adapter={runs / 'beside'}", *PAIRS)
    other = publish_wan(tmp_path / "other", random_wan(num_layers=2, seed=1))
    done = _train(folder, runs / "base", *longer, f"lora.base={other}")
    assert done.returncode == 1 and "holds other weights" in done.stdout + done.stderr
    done = _train(folder, runs / "base", *longer, f"lora.base={tmp_path / 'nowhere'}")
    assert (
        done.returncode == 1 and "set lora.base to their present path" in done.stdout + done.stderr
    )
    done = _train(folder, runs / "base", *longer, f"lora.base={moved}")
    assert done.returncode == 0, done.stdout + done.stderr
