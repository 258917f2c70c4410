"""What a machine without internet lacks, of an index of tiny wheels."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.tiny_wheels import write_wheel
from tools.gpu import wheelhouse
from tools.gpu.wheelhouse import StandIn, install, read_present, requirements

EXAMPLE = "benchmarks/machines/cuda13_torch2.11_python3.12.txt"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """alpha needs beta, which the machine lacks; delta, which it has; gamma, too new there."""
    folder, machine = tmp_path / "index", platform.machine()
    needs = ["torch>=2.5", "beta>=2", "gamma<2", "delta>=1", "zeta", 'eps; python_version < "3"']
    write_wheel(folder, "alpha", "1.0", needs=needs)
    write_wheel(folder, "beta", "2.0", needs=["Delta_Name"])
    versions = {"torch": ("2.6", "2.13"), "triton": ("3.6",), "gamma": ("1.5", "3.0")}
    versions |= {"delta": ("1.1", "2.0"), "eps": ("1.0",), "delta_name": ("1.0",)}
    for name, numbers in versions.items():
        for number in numbers:
            write_wheel(folder, name, number)
    write_wheel(folder, "zeta", "1.0", tag=f"py3-none-manylinux_2_17_{machine}")
    write_wheel(folder, "zeta", "2.0", tag=f"py3-none-manylinux_2_31_{machine}")
    return folder


def flags(index: Path) -> list[str]:
    return ["--no-index", "--find-links", str(index)]


def test_what_is_present_counts_and_torch_stays(tmp_path, index):
    present = {"torch": "2.6+cu130", "gamma": "3.0", "delta": "1.1", "delta-name": "1.0"}
    (tmp_path / "old").mkdir()
    # zeta 2.0 asks for a newer C library than machines have.
    versions = {"alpha": "1.0", "beta": "2.0", "gamma": "1.5", "zeta": "1.0"}
    machine = StandIn(present, tmp_path, flags(index))
    assert machine.resolve("alpha") == versions
    fetched = [file.name for file in machine.fetch({"zeta": "1.0"})]
    assert fetched == [f"zeta-1.0-py3-none-manylinux_2_17_{platform.machine()}.whl"]
    with pytest.raises(ValueError, match=r"(?s)alpha 1.0 depends on torch>=2.5.*does not run"):
        StandIn({"torch": "2.1"}, tmp_path / "old", flags(index)).resolve("alpha")


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A project that needs alpha, and of its optional dependencies delta; not beta by itself."""
    root = tmp_path / "checkout"
    (root / "docker").mkdir(parents=True)
    (root / "pyproject.toml").write_text(
        '[project]\ndependencies = ["alpha>=1"]\n'
        '[project.optional-dependencies]\ndev = ["delta>=1", "beta>=1"]\n'
    )
    (root / "docker/requirements.txt").write_text("alpha==1.1\nmegatron-core-like==2\n")
    monkeypatch.setattr(wheelhouse, "ROOT", root)
    monkeypatch.setattr(wheelhouse, "EXTRAS", ("delta",))
    monkeypatch.setattr(wheelhouse, "ALONE", ("front>=1",))
    return root


def run(folder: Path, index: Path, present: str, *arguments: str) -> int:
    (folder / "present.txt").write_text(present)
    given = ["--present", str(folder / "present.txt"), "--output", str(folder / "out"), *arguments]
    return wheelhouse.main([*given, *flags(index)])


@pytest.mark.slow
def test_sizes_are_said_and_too_much_is_refused(tmp_path, index, checkout, capsys):
    """Also: what no run imports is not fetched, and neither are the needs of ALONE."""
    write_wheel(index, "alpha", "1.1", fill=1_500_000, needs=["s3fs"])
    write_wheel(index, "s3fs", "2026.9")
    write_wheel(index, "front", "1.32", needs=["gamma"])
    assert run(tmp_path, index, "torch==2.6\n", "--limit-mb", "1") == 1
    assert "1.5 MB, and 1.0 MB may be carried" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old-1.0-py3-none-any.whl").touch()
    assert run(tmp_path, index, "torch==2.6\n") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "    1.50 MB  alpha 1.1" and said[-2] == "    1.50 MB  3 wheels"
    names = sorted(file.name.split("-")[0] for file in (tmp_path / "out").iterdir())
    assert names == ["alpha", "delta", "front"]


def test_faults_of_the_list_the_python_and_the_names_are_told(tmp_path, index, checkout, capsys):
    for text, words in {
        "torch==2.6\nPackage Version\n": "present.txt:2: 'Package Version' is not name==version",
        "numpy==2.0\n": "lists no torch",
    }.items():
        assert run(tmp_path, index, text) == 1
        assert words in capsys.readouterr().err
    assert run(tmp_path, index, "torch==2.6\n", "--python-version", "3.9") == 1
    assert "the machine has 3.9" in capsys.readouterr().err
    assert run(tmp_path, index, "torch==2.6\n", "--also", "gamma") == 1
    assert "--also gamma: pyproject.toml has beta, delta" in capsys.readouterr().err
    assert "beta>=1" in requirements(checkout, ["beta"]) and "beta>=1" not in requirements(checkout)
    write_wheel(index, "alpha", "1.2", needs=["triton"])
    assert run(tmp_path, index, "torch==2.6\n") == 1
    assert "triton==3.6 would be fetched" in capsys.readouterr().err


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
    with pytest.raises(ValueError, match="the wheels bring torch"):
        install(wheels, site)
    assert not mark.exists() and (site / "alpha/__init__.py").is_file()
    with pytest.raises(ValueError, match="has no wheels"):
        install(tmp_path / "none", site)
