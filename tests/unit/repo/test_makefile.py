from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

TARGETS = ("quickstart", "test", "test-all", "test-newer", "lint", "wheelhouse", "gpu")
TARGETS += ("clean", "help")


def make(root: Path, *arguments: str) -> str:
    """What make prints; the jobs of an outer make are none of its business."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", *arguments], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_help_lists_the_target(repo_root: Path, target: str) -> None:
    assert re.search(rf"^make {target} +\S", make(repo_root), re.MULTILINE)


@pytest.mark.parametrize("target", ["quickstart", "test", "test-all", "lint", "gpu"])
def test_target_sets_itself_up(repo_root: Path, target: str, tmp_path: Path) -> None:
    """In a folder without .venv, the first commands make it and install into it."""
    (tmp_path / "pyproject.toml").touch()
    commands = make(tmp_path, "--dry-run", "--file", str(repo_root / "Makefile"), target)
    made, *rest = commands.splitlines()
    assert made.endswith("-m venv .venv")
    # Together: pip would replace a torch that the project does not allow.
    assert re.search(r'install .*"torch==\S+" --editable \.$', rest[0])
    assert ('".[dev]"' in commands) == (target != "quickstart")


@pytest.mark.parametrize("target", ["quickstart", "test", "test-all", "lint"])
def test_second_run_reuses_the_environment(repo_root: Path, target: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    for stamp in ("core", "dev"):
        (tmp_path / ".venv" / stamp).touch()
    commands = make(tmp_path, "--dry-run", "--file", str(repo_root / "Makefile"), target)
    assert "pip install" not in commands and "-m venv" not in commands


def test_changed_dependencies_are_installed(repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    for stamp in ("core", "dev"):
        (tmp_path / ".venv" / stamp).touch()
        os.utime(tmp_path / ".venv" / stamp, (1, 1))
    (tmp_path / "pyproject.toml").touch()
    commands = make(tmp_path, "--dry-run", "--file", str(repo_root / "Makefile"), "test")
    assert '".[dev]"' in commands


def test_a_python_that_is_too_old_or_too_new_is_refused(repo_root: Path, tmp_path: Path) -> None:
    """With no Python 3.11 or 3.12 to be found, make says so before it installs anything."""
    (tmp_path / "pyproject.toml").touch()
    arguments = ("--dry-run", "--file", str(repo_root / "Makefile"), "PYTHON=", "test")
    done = subprocess.run(["make", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no Python 3.11 or 3.12 found" in done.stderr


def test_test_runs_what_is_not_slow_and_test_all_everything(repo_root: Path) -> None:
    assert '-m "not slow"' in make(repo_root, "--dry-run", "test")
    assert "slow" not in make(repo_root, "--dry-run", "test-all")


def test_the_newest_megatron_core_goes_before_the_installed_one(repo_root: Path) -> None:
    *_, last = make(repo_root, "--dry-run", "test-newer").splitlines()
    assert f"PYTHONPATH={repo_root}/.venv/newer " in last and "tests/unit/train" in last


@pytest.mark.parametrize("target", ["test", "test-newer"])
def test_another_torch_is_tested_in_a_folder_of_its_own(repo_root: Path, target: str) -> None:
    options = ("VENV=.venv-other", "TORCH=torch==2.11.0")
    commands = make(repo_root, "--dry-run", target, *options).splitlines()
    assert not [one for one in commands if ".venv" in one.replace(".venv-other", "")]
    assert sum('"torch==2.11.0"' in one for one in commands) == 1
    newer = f"PYTHONPATH={repo_root}/.venv-other/newer "
    assert commands[-1].startswith(newer if target == "test-newer" else "OMP_NUM_THREADS=1 ")
    assert " .venv-other/bin/python -m pytest " in commands[-1]


def test_the_machine_is_measured_with_its_own_python(repo_root: Path) -> None:
    """With wheels nothing is installed into .venv, and torch is that of the named Python."""
    options = ("WHEELHOUSE=wheels", "PYTHON=/its/python", "LIMIT=540", "PARTS=xl-eager tests")
    commands = make(repo_root, "--dry-run", "gpu", *options)
    assert commands.startswith("/its/python -m tools.gpu --wheelhouse wheels ")
    assert '--limit 540 --parts "xl-eager tests"' in commands
    assert "pip" not in commands and "-m venv" not in commands


def test_wheels_are_chosen_by_the_python_of_the_other_machine(repo_root: Path) -> None:
    options = ("PYTHON_VERSION=3.12", "PYTHON=/some/python3.12", "PRESENT=list.txt")
    commands = make(repo_root, "--dry-run", "wheelhouse", *options)
    assert commands.startswith("/some/python3.12 -m tools.gpu.wheelhouse --python-version 3.12")
    assert "--present list.txt" in commands and "--output runs/wheelhouse" in commands


def test_ci_runs_lint_and_all_tests(repo_root: Path) -> None:
    script = repo_root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    commands = [re.split("[#&|]", x)[0].split() for x in lines if x.startswith("make ")]
    assert [command[1] for command in commands] == [".venv/dev", "lint", "test-all"]
    # What runs beside the tests, and they themselves, count where both have ended.
    rest = "\n".join(lines).partition("\nmake test-all")[2].splitlines()
    assert rest[1].startswith('wait "$linters" || {') and rest[1].endswith("exit 1; }")
    assert (rest[0][-12:], rest[2]) == (" || tests=$?", '[ "${tests:-0}" -eq 0 ] || exit "$tests"')
    # A variable that the Makefile does not read would be ignored without a word.
    for variable in (word.partition("=")[0] for command in commands for word in command[2:]):
        assert f"$({variable})" in (repo_root / "Makefile").read_text()


def test_ci_meets_another_release_on_other_kernels(repo_root: Path) -> None:
    """One run for both; the tests of numbers where there is no other release."""
    text = (repo_root / ".ci" / "run").read_text().replace("\\\n", "")
    _, found, block = text.partition("export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2\n")
    assert found
    first, newer, otherwise, named, *_ = [line.strip() for line in block.splitlines()]
    assert first == "if make .venv/newer; then"
    assert (newer, otherwise) == ("make test-newer JOBS=3", "else")
    (alone,) = re.findall(r'^make test JOBS=3 TESTS="(.+)"$', named)
    *_, last = make(repo_root, "--dry-run", "test-newer").splitlines()
    numbers = alone.split()
    assert "tests/contract/test_parity.py" in numbers
    for name in numbers:
        assert (repo_root / name).exists(), name
        assert re.search(rf" {name}( |$)| {Path(name).parent}( |$)", last), name
