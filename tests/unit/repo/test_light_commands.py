"""Every command answers `--help`, and `--print-config` if it has it, without heavy packages.

One process runs them all: a package that one of them imports is named with the line that does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.convert.diffusers_config import diffusers_transformer_config
from dit.models.registry import pairs
from recipes import pretrain_dit
from recipes.runs import dit_debug

HEAVY = ("torch", "megatron", "diffusers", "transformers", "sklearn", "matplotlib", "webdataset")
MAIN = '__name__ == "__main__"'
INNER = {"tools/gpu/worker.py", "tools/parity_packs.py"}
"""Programs that others start, without options."""
# Runs commands; its last line is JSON: [command, what it imported, its exit code, its output].
PROBE = """
import argparse, contextlib, io, json, os, runpy, sys, traceback

root, heavy, commands = sys.argv[1], set(json.loads(sys.argv[2])), json.loads(sys.argv[3])
found, asked, names = [], [], []


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            lines = [f for f in traceback.extract_stack() if f.filename.startswith(root)]
            ours = [f for f in lines if "site-packages" not in f.filename]
            asked.append(f"{name} by {os.path.relpath(ours[-1].filename, root)}:{ours[-1].lineno}")
            raise ImportError(f"{name} is heavy")


def remember(self, name, _add=argparse._SubParsersAction.add_parser, **options):
    names.append(name)
    return _add(self, name, **options)


def call(file, words):
    del asked[:], names[:]
    sys.argv, sys.path[0], out = [file, *words], os.path.dirname(file), io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            if os.path.basename(file) == "__main__.py":
                sys.path[0] = root
                place = os.path.relpath(os.path.dirname(file), root).replace(os.sep, ".")
                runpy.run_module(f"{place}.__main__", run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(file, run_name="__main__")
            code = None
        except SystemExit as end:
            code = end.code
        except ImportError as error:
            code = str(error)
    found.append([[os.path.relpath(file, root), *words], list(asked), code or 0, out.getvalue()])


sys.meta_path.insert(0, Watch())
argparse._SubParsersAction.add_parser = remember
for file, *words in commands:
    call(os.path.join(root, file), words)
    if words == ["--help"]:
        for name in dict.fromkeys(names):
            call(os.path.join(root, file), [name, "--help"])
print(json.dumps(found))
"""


def commands_of(root: Path) -> list[str]:
    """Files of the tree that a person can start, relative to it."""
    tops = ("dit", "data_prep", "recipes", "benchmarks", "examples", "tools")
    files = [file for top in tops for file in sorted((root / top).rglob("*.py"))]
    mains = [f for f in files if f.name == "__main__.py" or MAIN in f.read_text()]
    return [name for file in mains if (name := str(file.relative_to(root))) not in INNER]


def answers(root: Path, commands: list[list[str]]) -> list[tuple[list[str], list[str], int, str]]:
    """Of each command and of its own commands: words, heavy imports, exit code, output."""
    words = [sys.executable, "-c", PROBE, str(root), json.dumps(HEAVY), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def explained(out: str) -> list[str]:
    """Names of options that a text of `--help` explains, beside those of help itself."""
    return [n for n in re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE) if n != "--help"]


def said(found: list[tuple[list[str], list[str], int, str]]) -> str:
    """A line for each command that asked for a heavy package."""
    return "\n".join(f"{' '.join(words)}: {asked[0]}" for words, asked, *_ in found if asked)


def weights_of(config: RunConfig, place: Path) -> Path:
    """A folder as Diffusers writes it, of zeros."""
    place.mkdir()
    told = json.dumps(diffusers_transformer_config(config))
    (place / "config.json").write_text(told)
    shapes = {n: shape for pair in pairs(config.model) for n, shape in pair.their_shapes.items()}
    zeros = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(zeros, place / "diffusion_pytorch_model.safetensors")
    return place


def test_no_help_and_no_printed_configuration_imports_torch(
    repo_root: Path, tmp_path: Path
) -> None:
    helps = answers(repo_root, [[file, "--help"] for file in commands_of(repo_root)])
    assert not said(helps), said(helps)
    assert not [words for words, _, code, out in helps if code or "usage:" not in out]
    long = {" ".join(words): len(explained(out)) for words, _, _, out in helps}
    assert not {words: count for words, count in long.items() if count > 10}
    assert ["data_prep/__main__.py", "image", "--help"] in [words for words, *_ in helps]
    printing = [words[0] for words, *_, out in helps if "--print-config" in out]
    assert "recipes/pretrain_dit.py" in printing
    names, data = "optimizer.kind=muon", "train.epochs=2"
    files = sorted(repo_root.glob("conf/*_debug.yaml"))  # one of each family
    options = [["--config-file", str(file), "--print-config", data, names] for file in files]
    own, flux = tmp_path / "run", repo_root / "conf" / "flux_debug.yaml"
    whole = weights_of(load_config(dit_debug(), config_file=flux), tmp_path / "whole")
    frozen = "optimizer.groups=[{pattern: '*attention*', frozen: true}]"
    words = [f"checkpoint.load_hf={whole}", "checkpoint.also_save_hf=true", frozen]
    words += [f"checkpoint.save={own}", "--print-config"]
    starts = [[one, *words] for one in printing for words in options]
    starts += [["recipes/pretrain_dit.py", "--config-file", str(flux), *words]]
    printed = answers(repo_root, starts)
    assert not said(printed), said(printed)
    assert not [words for words, _, code, out in printed if code or "model:" not in out]
    assert not [words for words, *_, out in printed if "#" in out]  # the tree alone


@pytest.mark.parametrize(
    "tokens",
    [
        ("model.num_layer=3",),
        ("train.train_iters=abc", "optimizer.lr=fast"),
        ("model.hidden_size=100", "model.num_attention_heads=7"),
        ("--mock", "model.num_layers=4", "train.global_batch_size=0"),
        ("--config-file", "absent.yaml"),
        ("--recipe", "dit_xxl"),
    ],
    ids=" ".join,
)
def test_a_printed_configuration_has_the_errors_of_a_start(
    tokens: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("dit.distributed.process_groups.start_processes", None)
    found = []
    for flags in ((), ("--dry-run",), ("--print-config",)):
        with pytest.raises(ValueError) as caught:
            pretrain_dit.main([*tokens, *flags])
        found.append(str(caught.value))
    assert found[0] and found[0] == found[1] == found[2]


def test_the_first_run_on_a_gpu_starts_with_the_standard_library_alone(repo_root: Path) -> None:
    """It must be able to say that torch or a package is missing."""
    code = "import sys, tools.gpu.__main__, tools.gpu.wheelhouse\n"
    code += "print({*sys.modules} & {'torch', 'numpy'})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=repo_root, capture_output=True, text=True, env={}
    )
    assert done.stdout == "set()\n", done.stderr
