"""Lists the files of a checkout that a run opens, and those with a function that is called.

Each run is the command of a user in a process of its own, with that checkout first on the module
path. A trace notes the functions that are called, also during imports. Generated methods,
comprehensions and bodies of classes do not count as functions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.source_tree import TOPS

_TRACED = """
import inspect, json, runpy, sys, threading
from pathlib import Path
tree, out, module, *words = sys.argv[1:]
sys.path[0] = tree
UNNAMED = ("<list", "<dict", "<set", "<gen")  # comprehensions
entered, begins = set(), tree + "/"

def note(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith(UNNAMED)
    if is_function and code.co_filename.startswith(begins):
        entered.add(code.co_filename)

threading.settrace(note)
sys.settrace(note)
sys.argv = [module, *words]
code = 0
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
finally:
    sys.settrace(None)
    place = Path(tree, *module.split("."))
    main = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
    opened = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    Path(out).write_text(json.dumps([[str(main), *filter(None, opened)], sorted(entered)]))
sys.exit(code)
"""
_FLUX = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 10,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 4, 4),
}


def opened_by_runs(tree: Path) -> dict[str, dict[str, Any]]:
    """The files that each of three runs opens, as `summary` describes them, by name of the run.

    The runs are a mock run, a LoRA run from its checkpoint, and an import of a tiny FLUX.

    Raises:
        SystemExit: a command failed; with its output.
    """
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        mock = ["--config-file", "conf/dit_debug.yaml", "train.train_iters=4"]
        lora = ["lora.rank=2", f"checkpoint.load={folder}/mock", "checkpoint.finetune=true"]
        FluxTransformer2DModel(**_FLUX).save_pretrained(folder / "flux")
        words = ["--hf-path", f"{folder}/flux", "--megatron-path", f"{folder}/imported"]
        train = "recipes.pretrain_dit"
        runs = {
            "mock_run": (train, [*mock, f"checkpoint.save={folder}/mock"]),
            "lora_run": (train, [*mock, *lora, f"checkpoint.save={folder}/lora"]),
            "convert_import": ("dit.convert", ["import", *words, "objective.name=flow"]),
        }
        return {name: _opened(tree, folder, *run) for name, run in runs.items()}


def _opened(tree: Path, folder: Path, module: str, words: list[str]) -> dict[str, Any]:
    out = folder / "opened.json"
    done = subprocess.run(
        [sys.executable, "-c", _TRACED, str(tree), str(out), module, *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{module} {' '.join(words)}\nfailed:\n{done.stdout}{done.stderr}")
    opened, entered = (
        {Path(name).resolve() for name in names} for names in json.loads(out.read_text())
    )
    ours = sorted(file.relative_to(tree) for file in opened if file.is_relative_to(tree))
    ours = [file for file in ours if file.parts[0] in TOPS]
    return summary(tree, ours, [file for file in ours if tree / file not in entered])


def summary(tree: Path, opened: list[Path], idle: list[Path]) -> dict[str, Any]:
    """Numbers of files and lines of `opened`, in all and by folder, and of `idle`."""
    lines = {file: len((tree / file).read_text().splitlines()) for file in opened}
    folders: dict[str, list[int]] = defaultdict(list)
    for file, count in lines.items():
        folders["/".join(file.parts[:-1][:2])].append(count)
    return {
        "files": len(opened),
        "lines": sum(lines.values()),
        "idle": len(idle),
        "idle_lines": sum(lines[file] for file in idle),
        "folders": {folder: [len(n), sum(n)] for folder, n in sorted(folders.items())},
        "idle_files": [f"{file.as_posix()} {lines[file]}" for file in idle],
        "opened": [file.as_posix() for file in opened],
    }
