"""Every command answers `--help`, and `--print-config` if it has it, without heavy packages.

One process runs them all: a package that one of them imports is named with the line that does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import pretrain_dit

HEAVY = ("torch", "megatron", "diffusers", "transformers", "sklearn", "matplotlib", "webdataset")
MAIN = '__name__ == "__main__"'
INNER = {"benchmarks/gpu_run/worker.py", "tools/parity_packs.py"}
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
    tops = ("dit", "data_prep", "recipes", "benchmarks", "tools")
    files = [file for top in tops for file in sorted((root / top).rglob("*.py"))]
    mains = [f for f in files if f.name == "__main__.py" or MAIN in f.read_text()]
    return [name for file in mains if (name := str(file.relative_to(root))) not in INNER]


def answers(root: Path, commands: list[list[str]]) -> list[tuple[list[str], list[str], int, str]]:
    """Of each command and of its own commands: words, heavy imports, exit code, output."""
    words = [sys.executable, "-c", PROBE, str(root), json.dumps(HEAVY), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def said(found: list[tuple[list[str], list[str], int, str]]) -> str:
    """A line for each command that asked for a heavy package."""
    return "\n".join(f"{' '.join(words)}: {asked[0]}" for words, asked, *_ in found if asked)


def test_no_help_and_no_printed_configuration_imports_torch(repo_root: Path) -> None:
    helps = answers(repo_root, [[file, "--help"] for file in commands_of(repo_root)])
    assert not said(helps), said(helps)
    assert not [words for words, _, code, out in helps if code or "usage:" not in out]
    assert ["data_prep/__main__.py", "image", "--help"] in [words for words, *_ in helps]
    printing = [words[0] for words, *_, out in helps if "--print-config" in out]
    assert "recipes/pretrain_dit.py" in printing
    files = map(str, sorted(repo_root.glob("conf/*_debug.yaml")))  # one of each family
    options = [["--config-file", file, "--print-config"] for file in files]
    printed = answers(repo_root, [[one, *words] for one in printing for words in options])
    assert not said(printed), said(printed)
    assert not [words for words, _, code, out in printed if code or "model:" not in out]


@pytest.mark.parametrize(
    "tokens",
    [
        ("model.num_layer=3",),
        ("train.train_iters=abc", "optimizer.lr=fast"),
        ("model.hidden_size=100", "model.num_attention_heads=7"),
        ("--mock", "model.hidden_size=1048576", "model.num_layers=100000"),
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
