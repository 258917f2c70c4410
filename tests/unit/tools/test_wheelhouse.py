"""What a machine without internet lacks, of an index of tiny wheels."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_wheels import write_wheel
from tools.gpu import wheelhouse
from tools.gpu.wheelhouse import install, read_present, requirements

EXAMPLE = "benchmarks/machines/cuda13_torch2.11_python3.12.txt"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """alpha needs beta, which the machine lacks; delta, which it has; gamma, too new there."""
    folder, machine = tmp_path / "index", platform.machine()
    needs = ["torch>=2.5", "beta>=2", "gamma<2", "delta>=1", "zeta", 'eps; python_version < "3"']
    write_wheel(folder, "alpha", "1.0", fill=1_500_000, needs=[*needs, "s3fs"])
    write_wheel(folder, "beta", "2.0", needs=["Delta_Name"])
    write_wheel(folder, "front", "1.32", needs=["delta<1"])
    versions = {"torch": ("2.6", "2.13"), "triton": ("3.6",), "gamma": ("1.5", "3.0")}
    versions |= {"delta": ("1.1", "2.0"), "eps": ("1.0",), "delta_name": ("1.0",), "s3fs": ("1",)}
    for name, numbers in versions.items():
        for number in numbers:
            write_wheel(folder, name, number)
    write_wheel(folder, "zeta", "1.0", tag=f"py3-none-manylinux_2_17_{machine}")
    write_wheel(folder, "zeta", "2.0", tag=f"py3-none-manylinux_2_31_{machine}")
    return folder


@pytest.fixture
def run(tmp_path, index, monkeypatch) -> Callable[..., int]:
    """`make wheelhouse` of a project that needs alpha, for a machine that has the packages."""
    (root := tmp_path / "checkout/docker").mkdir(parents=True)
    (root / "requirements.txt").write_text("alpha==1.1\nmegatron-core-like==2\n")
    (root.parent / "pyproject.toml").write_text(
        '[project]\ndependencies = ["alpha>=1"]\n'
        '[project.optional-dependencies]\ndev = ["delta>=1", "beta>=1", "triton"]\n'
    )
    monkeypatch.setattr(wheelhouse, "ROOT", root.parent)
    monkeypatch.setattr(wheelhouse, "EXTRAS", ("delta",))
    monkeypatch.setattr(wheelhouse, "ALONE", ("front>=1",))

    def run(present: str, *arguments: str) -> int:
        (file := tmp_path / "present.txt").write_text(present)
        given = ["--present", str(file), "--output", str(tmp_path / "out"), *arguments]
        return wheelhouse.main([*given, "--no-index", "--find-links", str(index)])

    return run


@pytest.mark.slow
def test_what_the_machine_lacks_is_fetched_and_too_much_is_refused(tmp_path, run, capsys):
    """What no run imports is not fetched, nor what ALONE declares, nor zeta for a newer glibc."""
    present = "torch==2.6+cu130\ngamma==3.0\ndelta==1.1\ndelta-name==1.0\n"
    assert run(present, "--limit-mb", "1") == 1
    assert "1.5 MB, and 1.0 MB may be carried" in capsys.readouterr().err
    out = tmp_path / "out"
    assert not out.exists()
    out.mkdir()
    (out / "old-1.0-py3-none-any.whl").touch()
    assert run(present) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "    1.50 MB  alpha 1.0" and said[-2] == "    1.50 MB  5 wheels"
    names = {"-".join(file.name.split("-")[:2]) for file in out.iterdir()}
    assert names == {"alpha-1.0", "beta-2.0", "front-1.32", "gamma-1.5", "zeta-1.0"}


@pytest.mark.parametrize(
    ("present", "arguments", "words"),
    [
        ("torch==2.6\nA B\n", "", "present.txt:2: 'A B' is not name==version"),
        ("numpy==2.0\n", "", "lists no torch"),
        ("torch==2.1\n", "", r"(?s)alpha 1.0 depends on torch>=2.5.*does not run"),
        ("torch==2.6\n", "--python-version 3.9", "the machine has 3.9"),
        ("torch==2.6\n", "--also gamma", "pyproject.toml; give one of beta, delta, triton"),
        ("torch==2.6\n", "--also triton", "triton==3.6 would be fetched"),
    ],
)
def test_what_is_wrong_with_the_list_the_python_or_a_name_is_told(
    run, capsys, present, arguments, words
):
    assert run(present, *arguments.split()) == 1
    assert re.search(words, capsys.readouterr().err)


def test_the_project_asks_for_what_the_run_imports(repo_root):
    needed = requirements(repo_root)
    (core,) = [one for one in needed if one.startswith("megatron-core==")]
    assert core in (repo_root / "docker/requirements.txt").read_text().splitlines()
    names = {one.split(">")[0].split("=")[0] for one in needed}
    assert {"torch", "megatron-core", "megatron-energon", "pytest", "diffusers"} <= names
    more = {one.split(">")[0] for one in requirements(repo_root, ["flash-attn-4"])}
    assert "flash-attn-4" in more and "flash-attn-4" not in names
    # Compilers of kernels, and a way to cuDNN: not parts of CUDA.
    for name in ("nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "triton"):
        assert bool(wheelhouse._FIXED.fullmatch(name)) == (name in ("nvidia-cudnn-cu13", "triton"))
    present = read_present(repo_root / EXAMPLE)
    assert present["torch"] == "2.11.0" and present["triton"] == "3.6.0"
    assert {"numpy", "safetensors", "transformers", "scikit-learn", "rich"} <= present.keys()
    assert "megatron-core" not in present


def test_wheels_are_installed_once_and_never_torch(tmp_path, repo_root):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    write_wheel(wheels, "alpha", "1.0", needs=["beta"])
    assert install(wheels, site) == 1
    (metadata,) = site.glob("megatron_dit-*.dist-info/METADATA")
    version = metadata.read_text().split("Version: ")[-1].strip()
    assert f'version = "{version}"' in (repo_root / "pyproject.toml").read_text()
    mark = site / "alpha/mark"
    mark.touch()
    assert install(wheels, site) == 1 and mark.exists()
    write_wheel(wheels, "torch", "2.6")
    with pytest.raises(ValueError, match="has wheels of torch, which would replace"):
        install(wheels, site)
    assert not mark.exists() and (site / "alpha/__init__.py").is_file()
    with pytest.raises(ValueError, match="has no wheels"):
        install(tmp_path / "none", site)
