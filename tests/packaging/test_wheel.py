"""The wheel holds the code, and the code runs from it, far from the checkout."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = ("dit", "data_prep", "recipes", "conf")
FOLDERS += ("benchmarks", "examples", "tools")  # a wheel has none of them


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """Built from a copy: a build leaves files beside its sources that the next one packs again."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*SOURCES, *FOLDERS):
        source = repo_root / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Python of a clean environment with the wheel. What it depends on is borrowed from ours."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    # Only the path itself: ours has a .pth file that leads to the checkout, and it is not read.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def run(python: Path, folder: Path, *arguments: str) -> str:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules(root: Path) -> list[str]:
    files = [
        f for top in ("dit", "data_prep", "recipes") for f in sorted((root / top).rglob("*.py"))
    ]
    names = [f.relative_to(root).as_posix() for f in files]
    names.remove("recipes/evaluate_digits.py")  # it needs examples/
    return names


def test_wheel_holds_all_code_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    settings = [f"recipes/conf/{f.name}" for f in (repo_root / "conf").glob("*.yaml")]
    pages = ["dit/report/page.html", "dit/report/page.js", "dit/playground/page.html"]
    pages += ["data_prep/inspect/page.html", "dit/planner/layer_units.json"]
    assert sorted(names) == sorted([*modules(repo_root), *settings, *pages])


def test_wheel_carries_its_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (licence,) = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
    assert b"Apache License" in archive.read(licence)


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(python: Path, repo_root: Path, tmp_path: Path) -> None:
    names = [m.removesuffix(".py").replace("/", ".") for m in modules(repo_root)]
    names = [n.removesuffix(".__init__") for n in names if not n.endswith("__main__")]
    names.remove("dit.convert.bridge")  # its extra builds CUDA sources
    code = f"""
import importlib, sys
for name in {names!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), module.__file__
"""
    run(python, tmp_path, "-c", code)


@pytest.mark.slow
def test_commands_run_from_the_wheel(python: Path, tmp_path: Path) -> None:
    pack = ("-m", "data_prep", "digits", "--output_dir", "data", "--num_samples", "9")
    *_, following = run(python, tmp_path, *pack).splitlines()
    assert (tmp_path / "data" / ".nv-meta").is_dir()
    # It names the configuration of the wheel, and this Python, which a shell would not find.
    said, interpreter, *words = shlex.split(following)
    assert said == "next:" and Path(interpreter).samefile(python)
    assert "parameters" in run(python, tmp_path, *words, "--dry-run")
    assert "--prompt" in run(python, tmp_path, "-m", "recipes.generate_dit", "--help")
