"""Wheels -> a folder that the processes of this run see before the machine's own packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_STAMP = "wheels.txt"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def install(wheelhouse: Path, site: Path) -> int:
    """Unpacks the wheels into `site`, unless these very wheels are there; their number.

    Raises:
        ValueError: there are none, pip fails, or one would replace the machine's torch.
    """
    wheels = sorted(wheelhouse.glob("*.whl"))
    if not wheels:
        raise ValueError(f"{wheelhouse} has no wheels; `make wheelhouse` collects them elsewhere")
    listed = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels)
    stamp = site / _STAMP
    if stamp.is_file() and stamp.read_text() == listed:
        return len(wheels)
    shutil.rmtree(site, ignore_errors=True)
    flags = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(site)]
    done = subprocess.run([*command, *map(str, wheels)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"pip did not install the wheels:\n{done.stderr.strip()}")
    if found := [name for name in ("torch", "triton") if (site / name).exists()]:
        raise ValueError(f"the wheels bring {' and '.join(found)}, which must be the machine's")
    # This project is run from its checkout, and asks for its own version.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    write_metadata(site, project["name"], project["version"])
    stamp.write_text(listed)
    return len(wheels)


def write_metadata(site: Path, name: str, number: str) -> None:
    """What says to pip, and to `importlib.metadata`, that a package of this version is there."""
    folder = site / f"{name.replace('-', '_')}-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (folder / "RECORD").touch()


def environment(site: Path | None) -> dict[str, str]:
    """For processes of this run: the checkout first, then the wheels, then the machine's.

    A run sets the allocator before CUDA starts; in one process for many runs it has started.
    """
    places = [ROOT, ROOT / "benchmarks", site, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(place) for place in places if place)
    quiet = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}  # the log is for errors
    if not any(name in os.environ for name in _ALLOCATOR):
        quiet[_ALLOCATOR[0]] = "expandable_segments:True"
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | quiet
