"""What a start refuses is what its dry run refuses, in the same words."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dit.codecs.text import ByteTable
from dit.safe_writing import FolderInUseError
from recipes.pretrain_dit import main
from tests.published import publish, random_model
from tests.unit.data.conftest import Shards

SMALL = (
    *("--recipe", "dit_debug", "dataset.num_workers=0", "model.in_channels=2"),
    *("model.crossattn_emb_size=8", "dataset.task_encoder_seq_length=64", "train.train_iters=1"),
    *("dataset.sample_multiple=4", "train.global_batch_size=1", "train.eval_iters=1"),
    *("checkpoint.save_interval=1", "train.eval_interval=1", "scheduler.lr_warmup_iters=0"),
    *(
        "dataset.mock=false",
        "model.num_layers=1",
        "model.hidden_size=48",
        "model.num_attention_heads=4",
    ),
)


@dataclass
class Place:
    """A folder of its own, and what a case may start from: `data`, `run`, `adapters`, `hf`."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        return self.root / name

    def words(self, *more: object) -> list[str]:
        given = [f"dataset.path={self.data}", f"checkpoint.save={self.new}", *map(str, more)]
        return [*SMALL, *given]


@pytest.fixture(scope="module")
def made(tmp_path_factory, groups) -> Path:
    """A dataset with a validation split, a run on it, one of adapters, and a Diffusers folder."""
    place, shards = Place(tmp_path_factory.mktemp("made")), Shards()
    shards.good_set(place.data, 30)
    shards.good_set(place.data, 10, first=30, split="val")
    shards.good_set(place.train_alone, 30)
    assert main(place.words(f"checkpoint.save={place.run}")) == 0
    tuned = ("lora.rank=2", "checkpoint.finetune=true", f"checkpoint.load={place.run}")
    assert main(place.words(f"checkpoint.save={place.adapters}", *tuned)) == 0
    publish(place.hf, random_model(num_layers=1))
    return place.root


def newest(run: Path) -> Path:
    (found,) = (run / "checkpoints").glob("step_*")
    return found


def lora_file(file: Path, *, name: str = "transformer.blocks.0.attn1.to_q") -> str:
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 5), f"{name}.lora_B.weight": torch.ones(5, 2)}
    safetensors.torch.save_file(tensors, file)
    return f"lora.init_from={file}"


def card(place: Place, **content: object) -> None:
    (place.data / "dataset_card.json").write_text(json.dumps({"format_version": 1, **content}))


def null_text(place: Place, width: int) -> None:
    null = {"text": torch.zeros(1, width)}
    safetensors.torch.save_file(null, place.data / "null_text.safetensors")


def moved_base(place: Place) -> None:
    """As if the run had been elsewhere, with a path of the same length."""
    file = newest(place.adapters) / "lora.json"
    content = file.read_text()
    file.write_text(content.replace("/run/", "/rux/"))


def without(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def encoded(place: Place) -> str:
    """Data that name their text encoder and decoder, and prompts for it."""
    settings = ByteTable(width=8).settings
    latent = {"channels": 2, "stride": 1, "temporal_stride": 1}
    size = {"num_frames": 1, "height": 8, "width": 8, "samples": 40}
    card(place, text_encoder=settings, latent=latent, sizes=[size])
    null_text(place, 8)
    (place.root / "p.txt").write_text("a prompt\n")
    return f"validation.prompts_file={place.root}/p.txt"


Prepare = Callable[[Place], "list[str] | None"]
# What is asked for, in words or by what is done to the files before; and what is said of it.
REFUSED: dict[str, tuple[Prepare, str]] = {
    "unknown key": (lambda p: ["train.iters=3"], "train.train_iters"),
    "layout": (lambda p: ["model.tensor_model_parallel_size=2"], "processes"),
    "inputs of the objective": (lambda p: ["objective.guidance=3"], "no guidance embedding"),
    # data
    "shard": (lambda p: without(p.data / "train/shard-000000.tar"), "is missing; restore it"),
    "index": (lambda p: without(p.data / "train/shard-000000.tar.idx"), "idx is missing"),
    "no dataset": (lambda p: without(p.data / ".nv-meta"), "no prepared dataset"),
    "card": (lambda p: card(p, latent={"channels": 5}), "set model.in_channels=5"),
    "text width": (lambda p: card(p, text_encoder={"width": 9}), "set model.crossattn_emb_size=9"),
    "damaged card": (
        lambda p: (p.data / "dataset_card.json").write_text("{") and None,
        "card.json",
    ),
    "no sample fits": (lambda p: ["model.in_channels=4"], "none of 30 training samples"),
    "too many readers": (lambda p: ["dataset.num_workers=31"], "lower dataset.num_workers"),
    "null text": (lambda p: null_text(p, 7), r"null_text.*\[1, 7\]"),
    "validation set": (
        lambda p: [f"validation.sets=[{{name: other, path: {p.nowhere}}}]"],
        "nowhere does not exist",
    ),
    "no validation split": (
        lambda p: [f"dataset.path={p.train_alone}"],
        "no samples in split `val`",
    ),
    "epochs of a blend": (
        lambda p: [
            "train.epochs=2",
            "dataset.path=null",
            f"dataset.blend=[{{path: {p.data}}}, {{path: {p.data}}}]",
        ],
        "train.epochs=2 counts passes",
    ),
    # the run folder
    "shards in the run folder": (lambda p: [f"checkpoint.save={p.data}"], "is a dataset"),
    "run folder in a file": (
        lambda p: [f"checkpoint.save={p.data}/train/shard-000000.tar/x"],
        "cannot be written",
    ),
    # checkpoints
    "finetune nothing": (
        lambda p: ["checkpoint.finetune=true", f"checkpoint.load={p.nowhere}"],
        "holds no checkpoint",
    ),
    "damaged checkpoint": (
        lambda p: without(newest(p.run) / "config.yaml") or [f"checkpoint.save={p.run}"],
        "has no config.yaml",
    ),
    "named checkpoint": (
        lambda p: (
            (p.run / "checkpoints/LATEST").write_text("step_7") and [f"checkpoint.save={p.run}"]
        ),
        "names 'step_7', which is not there",
    ),
    "another model": (
        lambda p: [f"checkpoint.save={p.run}", "model.num_layers=2"],
        "model.num_layers: 1 in the checkpoint, 2 here",
    ),
    "another objective": (
        lambda p: [f"checkpoint.save={p.run}", "objective.name=flow"],
        "objective.name: edm in the checkpoint, flow here",
    ),
    "tuning another model": (
        lambda p: ["checkpoint.finetune=true", f"checkpoint.load={p.run}", "model.num_layers=2"],
        "holds the weights of another model",
    ),
    "other data": (
        lambda p: [f"checkpoint.save={p.run}", "dataset.packing_buffer_size=7"],
        "packing_buffer_size: 100 when saved, 7 now",
    ),
    "position": (
        lambda p: without(newest(p.run) / "loader_00000.pt") or [f"checkpoint.save={p.run}"],
        "has no loader_00000.pt",
    ),
    # adapters
    "adapters beside nothing": (lambda p: ["lora.rank=2"], "beside weights, and there are none"),
    "adapters on another network": (
        lambda p: [
            *("lora.rank=2", "checkpoint.finetune=true", f"checkpoint.load={p.run}"),
            "model.num_layers=2",
        ],
        "holds the weights of another model",
    ),
    "adapters of no linear": (
        lambda p: [
            *("lora.rank=2", "checkpoint.finetune=true", f"checkpoint.load={p.run}"),
            "lora.targets=[nothing]",
        ],
        "lora.targets",
    ),
    "adapters of another file": (
        lambda p: [
            *("checkpoint.finetune=true", f"checkpoint.load={p.run}"),
            lora_file(p.root / "x.safetensors", name="transformer.blocks.9.attn9.to_q"),
        ],
        "lora.init_from",
    ),
    "adapters without their base": (
        lambda p: moved_base(p) or [f"checkpoint.save={p.adapters}", "lora.rank=2"],
        "the frozen weights of the adapters are not at",
    ),
    "all weights of adapters": (
        lambda p: [f"checkpoint.save={p.adapters}"],
        "holds LoRA adapters and no weights",
    ),
    # Diffusers folders
    "no folder": (lambda p: [f"checkpoint.load_hf={p.nowhere}"], "checkpoint.load_hf"),
    "another network": (
        lambda p: [f"checkpoint.load_hf={p.hf}", "model.hidden_size=64"],
        "describes another network",
    ),
    # what validation and exports need
    "no prompts": (
        lambda p: [f"validation.prompts_file={p.nowhere}.txt"],
        "validation.prompts_file",
    ),
    "no text encoder": (
        lambda p: (
            (p.root / "p.txt").write_text("a") and [f"validation.prompts_file={p.root}/p.txt"]
        ),
        "has no dataset_card.json that names the text encoder",
    ),
    "export": (
        lambda p: [
            "checkpoint.also_save_hf=true",
            "objective.name=flow",
            "objective.flow_shift=3",
            "objective.shift_base_tokens=64",
        ],
        "cannot express it",
    ),
}


# Modules of a start, and what of them refuses something that a dry run does not ask for.
PARTS = (
    *("train/trainer", "train/start_checks", "train/narrow_moments", "train/checkpoint/*"),
    *("train/metrics/writers", "data/passes", "data/preflight", "data/datasets", "data/loader*"),
    *("data/reshard", "sampling/validation/*", "convert/load_hf/*"),
)
NOT_IN_A_DRY_RUN = {
    "training, or what it writes": """
        trainer._train async_save._explain_errors loader.__next__ loader.state_dict loader._judge
        resume.run_folder resume._make_run_folder writers._wandb_run writers._wandb_id
        requests.* fid_clip._check""",
    "reads all numbers of the weights": """
        adapters.checked_base origin.read_origin paths.verify state_dict._read
        weights.fill_from_diffusers weights._fill""",
    "needs other processes, or the networks of codecs": """
        data_position._exchange samples._extractor prompt_requests._request_of_prompt""",
    "generation": "paths.saved_card paths.saved_null_inputs",
    "of other programs, or other files than these": """
        trainer._first_values datasets._check_metadataset feature_extractor.__init__""",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_run_refuses_what_a_start_refuses(made, tmp_path, capsys, name):
    prepare, said = REFUSED[name]
    place = Place(tmp_path / "here")
    shutil.copytree(made, place.root)
    words = place.words(*(prepare(place) or []))
    before = {path: path.stat().st_mtime_ns for path in place.root.rglob("*")}
    with pytest.raises(ValueError, match=said) as dry:
        main([*words, "--dry-run"])
    assert {path: path.stat().st_mtime_ns for path in place.root.rglob("*")} == before
    with pytest.raises(ValueError, match=said) as start:
        main(words)
    assert str(start.value) == str(dry.value)


def test_a_run_folder_in_use_is_refused_without_a_change(made, tmp_path):
    place = Place(tmp_path / "here")
    shutil.copytree(made, place.root)
    held = f"""
import sys, time
from pathlib import Path
from dit.safe_writing import only_writer
with only_writer(Path({str(place.run)!r}), named="held"):
    print("held", flush=True)
    sys.stdin.read()
"""
    words = place.words(f"checkpoint.save={place.run}")
    with subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=r"checkpoint\.save="):
            main([*words, "--dry-run"])
        other.communicate("")
    assert main([*words, "--dry-run"]) == 0


def test_what_this_machine_lacks(made, tmp_path, capsys, monkeypatch):
    """A missing package is refused; without a GPU, what asks for one is only said."""
    place = Place(tmp_path / "here")
    shutil.copytree(made, place.root)
    narrow = place.words("optimizer.exp_avg_dtype=bf16", "model.gradient_accumulation_fusion=true")
    assert main([*narrow, "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# start ")]
    assert "optimizer.exp_avg_dtype=bf16" in lines[0] and "needs Apex" in lines[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="need Transformer Engine"):
        main([*narrow, "--dry-run"])
    monkeypatch.undo()
    monkeypatch.setattr("dit.train.start_checks.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package wandb"):
        main([*place.words("logger.wandb_project=x"), "--dry-run"])


def test_data_that_are_elsewhere_are_said_and_all_else_is_checked(made, tmp_path, capsys):
    place = Place(made)
    away = [*place.words(), f"dataset.path={place.nowhere}", "--dry-run"]
    assert main(away) == 0
    assert "NOT CHECKED" in capsys.readouterr().out
    with pytest.raises(ValueError, match="beside weights, and there are none"):
        main([*away, "lora.rank=2"])


def test_a_file_of_diffusion_pipe_of_another_network_is_refused(made, tmp_path):
    file = tmp_path / "main.toml"
    file.write_text("[model]\ntype = 'wan'\n")
    for more in (["--dry-run"], []):
        with pytest.raises(ValueError, match=r"names a network of model\.family=wan, and"):
            main(["--config-file", str(file), *Place(made).words(), *more])


def raising(file: Path) -> Iterator[str]:
    """Names of the functions of a module that raise an error of their own."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            inner = {
                id(x)
                for f in ast.walk(node)
                if isinstance(f, ast.FunctionDef) and f is not node
                for x in ast.walk(f)
            }
            own = (
                x
                for x in ast.walk(node)
                if isinstance(x, ast.Raise) and x.exc and id(x) not in inner
            )
            if any(own):
                yield node.name


def test_every_function_that_refuses_a_start_runs_in_dry_runs(made, tmp_path, repo_root):
    """But for those that read what a dry run leaves alone, each with its reason."""
    called = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_name))

    tuned = ["checkpoint.finetune=true", "lora.rank=2"]
    for number, prepare in enumerate(
        (
            lambda p: [encoded(p), "train.epochs=2", "optimizer.exp_avg_dtype=bf16"],
            lambda p: [f"checkpoint.save={p.run}", "checkpoint.also_save_hf=true"],
            lambda p: [f"checkpoint.save={p.adapters}", "lora.rank=2"],
            lambda p: [*tuned, f"checkpoint.load={p.run}"],
            lambda p: [tuned[0], f"checkpoint.load={p.run}", "train.warm_start_ema=true"],
            lambda p: [tuned[0], f"checkpoint.load={p.run}", lora_file(p.root / "l.safetensors")],
            lambda p: [f"checkpoint.load_hf={p.hf}", "lora.rank=2"],
        )
    ):
        place = Place(tmp_path / str(number))
        shutil.copytree(made, place.root)
        words = place.words(*(prepare(place) or []))
        sys.setprofile(note)
        with suppress(ValueError):
            main([*words, "--dry-run"])
        sys.setprofile(None)
    refusing = [
        (file, name)
        for part in PARTS
        for file in sorted((repo_root / "dit").glob(f"{part}.py"))
        for name in raising(file)
    ]
    assert len(refusing) > 60
    missed = [f"{file.stem}.{name}" for file, name in refusing if (str(file), name) not in called]
    excused = " ".join(NOT_IN_A_DRY_RUN.values()).split()
    assert [name for name in missed if not any(fnmatch(name, one) for one in excused)] == []
