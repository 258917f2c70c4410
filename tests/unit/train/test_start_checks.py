"""What a start refuses is what its dry run refuses, in the same words."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from dit.codecs.text import ByteTable
from dit.safe_writing import FolderInUseError
from recipes.pretrain_dit import main
from tests.families.dit import publish, random_model
from tests.tables import table
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


FITTING: dict[str, Any] = {
    "num_layers": 1,
    "in_channels": 2,
    "out_channels": 2,
}
FITTING |= {"text_embed_dim": 8, "attention_head_dim": 12}
FITTING |= {"max_size": (128, 240, 240), "rope_scale": (1.0, 1.0, 1.0)}


@dataclass
class Place:
    """A folder of its own, and what a case may start from: `data`, `run`, `adapters`, `hf`."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        return self.root / name

    def words(self, *more: object) -> list[str]:
        given = [f"dataset.path={self.data}", f"checkpoint.save={self.new}", *map(str, more)]
        return [*SMALL, *given]

    def named(self, asked: list[str]) -> list[str]:
        """Words with their paths, which are written as $NAME."""
        return [re.sub(r"\$(\w+)", lambda found: str(self.root / found[1]), one) for one in asked]

    def prepared(self, prepare: Callable[[Place], object]) -> list[str]:
        """The words that `prepare` returns, if any, after what it does to the files."""
        more = prepare(self)
        return self.words(*(more if isinstance(more, list) else []))


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
    publish(place.hf, random_model(**FITTING))
    return place.root


def newest(run: Path) -> Path:
    (found,) = (run / "checkpoints").glob("step_*")
    return found


def lora_file(file: Path, *, name: str = "transformer_blocks.0.attn1.to_q") -> str:
    """Adapters of rank 2 of a linear of 48 inputs and outputs."""
    factors = {f"{name}.lora_A.weight": (2, 48), f"{name}.lora_B.weight": (48, 2)}
    safetensors.torch.save_file({n: torch.ones(shape) for n, shape in factors.items()}, file)
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


def encoded(place: Place, content: str = "a prompt\n", *, suffix: str = "txt") -> str:
    """Data that name their text encoder, and prompts for it."""
    settings = ByteTable(width=8).settings
    latent = {"channels": 2, "stride": 1, "temporal_stride": 1}
    size = {"num_frames": 1, "height": 8, "width": 8, "samples": 40}
    card(place, text_encoder=settings, latent=latent, sizes=[size])
    null_text(place, 8)
    (place.root / f"p.{suffix}").write_text(content)
    return f"validation.prompts_file={place.root}/p.{suffix}"


def given_picture(place: Place) -> str:
    """A prompt with a first frame."""
    Image.new("RGB", (8, 8)).save(place.root / "x.png")
    return encoded(place, '{"caption": "a", "image_path": "x.png"}', suffix="jsonl")


def long_validation(place: Place) -> None:
    """Half of the validation samples is longer than a pack."""
    shards, long = Shards(), torch.zeros(2, 1, 32, 32).half()
    long = shards.ours(long, torch.zeros(1, 8).bfloat16(), caption="long")
    shards.write(place.data, [*map(shards.good, range(5)), *[long] * 5], first=50, split="val")


def change(file: Path, before: str, after: str) -> None:
    """Puts another text into a file, and its checksum into the manifest beside it, if any."""
    content = file.read_bytes().replace(before.encode(), after.encode())
    assert content != file.read_bytes()
    file.write_bytes(content)


Prepare = Callable[[Place], object]
WORDS: dict[str, tuple[list[str], str]] = table(__file__, "refused")
# What is done to the files, and the words of the start if there are any; and what is said of it.
REFUSED: dict[str, tuple[Prepare, str]] = {
    **{name: (partial(Place.named, asked=asked), said) for name, (asked, said) in WORDS.items()},
    # data
    "shard": (lambda p: without(p.data / "train/shard-000000.tar"), "is missing; restore it"),
    "index": (lambda p: without(p.data / "train/shard-000000.tar.idx"), "idx is missing"),
    "no dataset": (lambda p: without(p.data / ".nv-meta"), "not a prepared dataset"),
    "card": (lambda p: card(p, latent={"channels": 5}), "set model.in_channels=5"),
    "text width": (lambda p: card(p, text_encoder={"width": 9}), "set model.crossattn_emb_size=9"),
    "damaged card": (
        lambda p: (p.data / "dataset_card.json").write_text("{") and None,
        "card.json",
    ),
    "null text": (lambda p: null_text(p, 7), r"null_text.*\[1, 7\]"),
    "validation samples that do not fit": (long_validation, "5 of 10 samples cannot be used"),
    # checkpoints
    "damaged index": (
        lambda p: (
            (newest(p.run) / ".metadata").write_bytes(
                b"x" * (newest(p.run) / ".metadata").stat().st_size
            )
            and ["checkpoint.finetune=true", f"checkpoint.load={p.run}"]
        ),
        "damaged: .metadata changed",
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
    "position": (
        lambda p: without(newest(p.run) / "loader_00000.pt") or [f"checkpoint.save={p.run}"],
        "has no loader_00000.pt",
    ),
    # adapters
    "adapters of another file": (
        lambda p: [
            *("checkpoint.finetune=true", f"checkpoint.load={p.run}"),
            lora_file(p.root / "x.safetensors", name="transformer_blocks.9.attn1.to_q"),
        ],
        "lora.init_from",
    ),
    "adapters without their base": (
        lambda p: moved_base(p) or [f"checkpoint.save={p.adapters}", "lora.rank=2"],
        "the frozen weights under the adapters are not at",
    ),
    "rank of a file": (
        lambda p: [
            *("lora.rank=4", "checkpoint.finetune=true", f"checkpoint.load={p.run}"),
            lora_file(p.root / "x.safetensors"),
        ],
        "and decide; leave lora.rank out",
    ),
    # Diffusers folders
    "damaged description": (
        lambda p: change(p.hf / "config.json", "{", "[") or [f"checkpoint.load_hf={p.hf}"],
        "config.json",
    ),
    "no weights": (
        lambda p: without(next(p.hf.glob("*.safetensors"))) or [f"checkpoint.load_hf={p.hf}"],
        "has neither diffusion_pytorch_model.safetensors nor",
    ),
    # what validation and exports need
    "empty prompts": (lambda p: [encoded(p, "\n")], "has no prompt; write at least one"),
    "damaged prompts": (lambda p: [encoded(p, "{", suffix="json")], "is not valid JSON"),
    "picture that is not there": (
        lambda p: [encoded(p, '{"caption": "a", "image_path": "no.png"}', suffix="jsonl")],
        "the picture .*no.png.* is neither in",
    ),
    "sound that is given": (
        lambda p: [encoded(p, '{"caption": "a", "sound_path": "p.jsonl"}', suffix="jsonl")],
        "only generate_dit.py can take frames or sound from a file",
    ),
    "picture that the network does not take": (
        lambda p: [given_picture(p)],
        "the network takes no picture",
    ),
    "no text encoder": (
        lambda p: (
            (p.root / "p.txt").write_text("a") and [f"validation.prompts_file={p.root}/p.txt"]
        ),
        "has no dataset_card.json that names the text encoder",
    ),
}


# What a start calls and a dry run does not, although it raises errors of its own, by the reason.
NOT_IN_A_DRY_RUN = {
    "tells one rank the error of another": "collective_errors.* data_position._exchange",
    "reads all numbers of weights": """
        checkpoint.checked_base starting_point.read_origin checkpoint_paths.verify state_dict._read
        start.fill_from_diffusers start._fill start._check diffusers_checkpoint.read""",
    "reads validation samples, of which a dry run reads the heads": """
        validation_groups.read stages.restore_sample cook.* rejections.check""",
    "has texts encoded": """
        prompt_requests._request_of_prompt given_pictures._ends given_pictures._references
        generate.check_requests
        generate._blank samples._extractor""",
    "writes": "start.run_folder start._make_run_folder safe_writing._lock jsonl.*",
    "fetches, where a dry run asks what there is to fetch (to_fetch)": "mirror.restored",
    "explains what happens in training": "resumable_loader.deaths_in_words",
    "raises for programs that give no `start`": "start._stored_values",
    "rules of the configuration refuse that before": "stack.pipeline_stages",
    "only where `train.epochs` is given": "passes.steps_of_epochs",
    "a dry run may name the processes of a run elsewhere by WORLD_SIZE": """
        launched.check_launch launched._check_starter""",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_run_refuses_what_a_start_refuses(made, tmp_path, capsys, name):
    prepare, said = REFUSED[name]
    place = Place(tmp_path / "here")
    shutil.copytree(made, place.root)
    words = place.prepared(prepare)
    before = {path: path.stat().st_mtime_ns for path in place.root.rglob("*")}
    records = (place.run / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=said) as dry:
        main([*words, "--dry-run"])
    assert {path: path.stat().st_mtime_ns for path in place.root.rglob("*")} == before
    with pytest.raises(ValueError, match=said) as start:
        main(words)
    assert str(start.value) == str(dry.value)
    assert not (place.new / "metrics.jsonl").exists()
    assert (place.run / "metrics.jsonl").read_bytes() == records


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
    named = place.words("model.attention_backend=flash_2", "model.precision=bf16")
    assert main([*named, "--dry-run"]) == 0
    assert "flash_2 cannot be used: it needs an NVIDIA GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="need Transformer Engine"):
        main([*narrow, "--dry-run"])
    monkeypatch.undo()
    monkeypatch.setattr("dit.train.metrics.writers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package wandb"):
        main([*place.words("logger.wandb_project=x"), "--dry-run"])


def test_a_ring_beside_joint_attention_is_refused(monkeypatch):
    """Here, as one of two processes; a start of both would say it on machines with a ring."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--config-file", "conf/sd3_debug.yaml", "--mock", "model.context_parallel_size=2"]
    with pytest.raises(
        ValueError, match=r"model\.cp_comm_type=p2p works for a single sequence of tokens"
    ):
        main([*words, "model.cp_comm_type=p2p", "--dry-run"])


def test_data_that_are_elsewhere_are_said_and_all_else_is_checked(made, tmp_path, capsys):
    place = Place(made)
    away = [*place.words(), f"dataset.path={place.nowhere}", "--dry-run"]
    assert main(away) == 0
    assert "NOT CHECKED" in capsys.readouterr().out
    with pytest.raises(ValueError, match="on top of other weights, but the run has none"):
        main([*away, "lora.rank=2"])


def test_a_file_of_diffusion_pipe_starts_its_network_and_says_with_which_weights(
    made, tmp_path, caplog
):
    caplog.set_level("INFO")
    file = tmp_path / "main.toml"
    file.write_text("[model]\ntype = 'wan'\n")
    words = [*Place(made).words(), "dataset.mock=true", "dataset.path=null"]
    words += ["dataset.mock_samples=[{height: 8, width: 8, text_length: 1}]"]
    assert main(["--config-file", str(file), *words, "--dry-run"]) == 0
    said = "\n".join(caplog.messages)
    assert 'read as model.family="wan"' in said and "it begins with random weights" in said
    with pytest.raises(
        ValueError, match=r"to family wan, and .* holds weights of model\.family=dit"
    ):
        main(["--config-file", str(file), *words, f"checkpoint.load_hf={Place(made).hf}"])


Function = tuple[str, int]  # file and first line of a function


@cache
def raising(folder: Path) -> dict[Function, str]:
    """The functions of a folder that raise an error of their own, each with its name."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(raises_of(node)):
                line = min(one.lineno for one in (node, *node.decorator_list))
                found[str(file), line] = f"{file.stem}.{node.name}"
    return found


def raises_of(node: ast.AST) -> Iterator[bool]:
    """Whether each statement inside, but for those of inner functions, raises a new error."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield isinstance(child, ast.Raise) and child.exc is not None
            yield from raises_of(child)


def called_by(words: list[str]) -> set[Function]:
    """The functions that a command calls."""
    called = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        with suppress(StepOne):
            main(words)
    finally:
        sys.setprofile(None)
    return called


class StepOne(Exception):  # noqa: N818 - no error
    """Stands for the first step."""


TUNED = ("checkpoint.finetune=true", "lora.rank=2")
STARTS: dict[str, Prepare] = {
    "new": lambda p: [encoded(p), "validation.num_captions=1", "train.epochs=2"],
    "going on": lambda p: [f"checkpoint.save={p.run}"],
    "going on with adapters": lambda p: [f"checkpoint.save={p.adapters}", "lora.rank=2"],
    "adapters": lambda p: [*TUNED, f"checkpoint.load={p.run}"],
    "tuning": lambda p: [TUNED[0], f"checkpoint.load={p.run}", "train.warm_start_ema=true"],
    "adapters of a file": lambda p: [
        *(*TUNED, f"checkpoint.load={p.run}"),
        lora_file(p.root / "l.safetensors"),
    ],
    "Diffusers": lambda p: [f"checkpoint.load_hf={p.hf}"],
    "adapters of Diffusers": lambda p: [f"checkpoint.load_hf={p.hf}", "lora.rank=2"],
}


@pytest.mark.parametrize("name", STARTS)
def test_what_refuses_a_start_runs_in_its_dry_run(made, tmp_path, repo_root, monkeypatch, name):
    """But for what a dry run leaves alone, each with its reason."""

    def step_one(*_: object) -> None:
        raise StepOne

    monkeypatch.setattr("dit.train.trainer._train", step_one)
    place = Place(tmp_path / "here")
    shutil.copytree(made, place.root)
    words = place.prepared(STARTS[name])
    dry = called_by([*words, "--dry-run"])
    start = called_by(words)
    refusing = {k: v for part in ("dit", "recipes") for k, v in raising(repo_root / part).items()}
    assert len(refusing.keys() & start) > 20
    missed = {refusing[one] for one in refusing.keys() & start - dry}
    excused = " ".join(NOT_IN_A_DRY_RUN.values()).split()
    assert [name for name in sorted(missed) if not any(fnmatch(name, one) for one in excused)] == []
