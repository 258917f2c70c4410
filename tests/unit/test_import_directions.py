"""The folders of the data flow: who may import whom, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dit.models import registry
from tests.tables import table

OURS = ("dit", "data_prep", "recipes")
GROUND = {
    "dit.bin_packing",
    "dit.command_line",
    "dit.launched",
    "dit.local_path",
    "dit.console",
    "dit.device_specs",
    "dit.parsing",
    "dit.safe_pickle",
    "dit.safe_writing",
    "dit.stored_samples",
    "dit.streams",
    "dit.system_errors",
    "dit.token_ids",
    "dit.watching",
    "dit.progress",
}
BASE = GROUND | {"dit.batch", "dit.pack_wire", "dit.config"}
# The folders of families are below nobody: the registry imports them by name.
MODELS = {"dit.models", "dit.models.layer_spec", "dit.models.layers", "dit.models.stacks"}
MODELS |= {"dit.models.attention", "dit.models.compilation"}
MODELS |= {"dit.models.joint", "dit.models.kernels"}
STEP = BASE | MODELS | {"dit.config_loading", "dit.data", "dit.objectives", "dit.lora"}
STEP |= {"dit.distributed", "dit.distcp", "dit.checkpoint_paths", "dit.sizing"}
FAMILIES = {place.partition(".family:")[0] for place in registry.FAMILIES.values()}
# A part may import itself and these. A new part must say here where it stands.
ALLOWED = {
    "dit.bin_packing": set(),
    "dit.launched": {"dit.system_errors"},
    "dit.command_line": {"dit.local_path", "dit.streams"},
    "dit.local_path": set(),
    "dit.console": set(),
    "dit.parsing": {"dit.system_errors"},
    "dit.streams": {"dit.system_errors"},
    "dit.watching": {"dit.parsing", "dit.system_errors"},
    "dit.progress": {"dit.console"},
    "dit.safe_pickle": set(),
    "dit.safe_writing": {"dit.system_errors"},
    "dit.stored_samples": {"dit.parsing", "dit.system_errors"},
    "dit.system_errors": set(),
    "dit.token_ids": set(),
    "dit.batch": set(),
    "dit.pack_wire": {"dit.batch"},
    "dit.config": {"dit.local_path"},
    "dit.codecs": GROUND,
    "dit.objectives": BASE,
    "dit.distributed": BASE,
    "dit.device_specs": set(),
    "dit.models": BASE | {"dit.models.layer_spec"},
    "dit.models.layer_spec": set(),
    "dit.models.joint": BASE | {"dit.models", "dit.models.layer_spec"},
    "dit.models.kernels": set(),
    "dit.models.compilation": set(),
    "dit.models.attention": BASE
    | {"dit.models", "dit.models.compilation", "dit.models.layer_spec", "dit.models.kernels"},
    "dit.models.layers": BASE
    | {f"dit.models.{part}" for part in ("compilation", "layer_spec", "kernels", "attention")},
    "dit.models.stacks": BASE
    | {
        f"dit.models.{part}"
        for part in ("compilation", "layer_spec", "kernels", "layers", "attention")
    },
    **dict.fromkeys(FAMILIES, BASE | MODELS),
    "dit.config_loading": BASE | {"dit.models", "dit.foreign"},
    # Its command alone meets processes and weights.
    "dit.foreign": BASE | {"dit.models", "dit.config_loading", "dit.distributed", "dit.convert"},
    "dit.distcp": set(),
    "dit.checkpoint_paths": BASE | {"dit.config_loading", "dit.distributed"},
    "dit.lora": BASE | MODELS | {"dit.checkpoint_paths"},
    "dit.data": BASE | {"dit.models"},
    "dit.planner": BASE
    | {"dit.models", "dit.models.layer_spec", "dit.config_loading", "dit.sizing"},
    "dit.sizing": BASE | MODELS | {"dit.config_loading", "dit.data", "dit.distributed"},
    "dit.train": STEP,
    "dit.convert.cards": BASE
    | {"dit.checkpoint_paths", "dit.codecs", "dit.models", "dit.objectives", "dit.train"},
    "dit.convert": STEP | {"dit.train", "dit.convert.cards"},
    "dit.sampling": STEP | {"dit.codecs", "dit.train", "dit.convert"},
    "dit.playground": STEP | {"dit.report", "dit.codecs", "dit.sampling", "dit.train"},
    "dit.fitting": STEP | {"dit.planner", "dit.train"},
    "dit.layout_check": STEP | {"dit.train"},
    "dit.report": GROUND | {"dit.config", "dit.config_loading", "dit.models", "dit.sizing"},
    "data_prep": GROUND | {"dit.codecs"},
    "recipes": STEP
    | {
        "dit.codecs",
        "dit.convert",
        "dit.fitting",
        "dit.layout_check",
        "dit.planner",
        "dit.sampling",
        "dit.train",
    },
}
# Nothing that asks which process this is, or that needs a group of them.
PURE = {
    "data_prep": ("torch.distributed", "megatron.core"),
    "dit.codecs": ("torch.distributed", "megatron"),
    "dit.batch": ("torch.distributed", "megatron"),
    "dit.pack_wire": ("torch.distributed", "megatron"),
    "dit.config": ("torch", "megatron"),
    "dit.device_specs": ("torch", "megatron"),
    "dit.planner": ("torch", "megatron"),
    "dit.report": ("torch", "megatron"),
    "dit.data": ("torch.distributed", "megatron.core"),
    "dit.safe_pickle": ("torch.distributed", "megatron"),
    "dit.stored_samples": ("torch.distributed", "megatron"),
    "dit.objectives": ("torch.distributed", "megatron"),
}
# The one module that meets the other launched processes.
LAUNCHED = {"data_prep.engine.ranks"}
# Folders with floors of their own.
SPLIT = {
    "dit.convert.cards",
    *FAMILIES,
}
SPLIT |= MODELS - {"dit.models"}


def part_of(module: str) -> str:
    """dit.train.step -> dit.train; dit.models.dit.model -> dit.models.dit."""
    names = module.split(".")
    if ".".join(names[:3]) in SPLIT:
        return ".".join(names[:3])
    return ".".join(names[:2]) if names[0] == "dit" else names[0]


def imports_of(file: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, as far as the statement tells."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write the whole name of the module"
            assert node.module
            yield node.module
            # `from dit import objective` and `from torch import distributed` name a module, too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(root: Path) -> list[tuple[str, Path]]:
    """(dotted name, file) of all our modules."""
    files = [file for top in OURS for file in sorted((root / top).rglob("*.py"))]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return [(n.removesuffix(".__init__"), f) for n, f in zip(names, files, strict=True)]


def test_imports_point_one_way(repo_root: Path) -> None:
    wrong = []
    for module, file in sources(repo_root):
        if module == "dit":
            continue
        part = part_of(module)
        assert part in ALLOWED, f"{file}: add {part} to ALLOWED, with what it may import"
        for name in imports_of(file):
            if name.split(".")[0] not in OURS or name == "dit":
                continue
            if part_of(name) not in ALLOWED[part] | {part}:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_pure_parts_know_no_processes(repo_root: Path) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, file in sources(repo_root)
        if module not in LAUNCHED
        for name in imports_of(file)
        for banned in PURE.get(part_of(module), ())
        if name == banned or name.startswith(f"{banned}.")
    ]
    assert not wrong, "\n".join(wrong)


def test_model_and_loader_never_ask_for_a_rank(repo_root: Path) -> None:
    wrong = [
        f"{file}:{node.lineno}: {node.attr}"
        for module, file in sources(repo_root)
        if part_of(module) in {*MODELS, *FAMILIES, "dit.data", "dit.objectives"}
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"get_rank", "get_world_size"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("modules", "heavy"), table(__file__, "heavy"))
def test_heavy_packages_wait_until_they_are_used(
    modules: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    """megatron.core takes 4 s and half a gigabyte, and `--help` should come at once."""
    code = "\n".join(
        (
            "import sys",
            *(f"import {module}" for module in modules),
            f"loaded = set({heavy!r}) & set(sys.modules)",
            "sys.exit(f'loaded: {sorted(loaded)}' if loaded else 0)",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
