"""Whether all that a run on this machine imports is there, and which versions."""

from __future__ import annotations

import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_run.install import ROOT
from gpu_run.parts import Part
from gpu_run.schedule import Outcome, State

MODULES = (
    "triton",
    "megatron.core",
    "megatron.energon",
    "dit.train.trainer",
    "measuring.steps",
    "measuring.padded",
    "diffusers.models.transformers.transformer_cosmos",
    "pytest",
    "pytest_timeout",
    "hypothesis",
)
"""Each imports much more; the packages that are missing are named, not these."""
_VERSIONS = ("torch", "triton", "megatron-core", "megatron-energon", "numpy", "diffusers")


def check_imports(_part: Part, *, torch_file: str, **_: Any) -> Outcome:
    """What cannot be imported, and what this machine is."""
    import torch

    if os.path.realpath(str(torch.__file__)) != os.path.realpath(torch_file):
        why = f"torch is that of {torch.__file__}, and the machine's is {torch_file}"
        return {"state": State.FAILED, "why": why, "about": {}}
    tests = [f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    found = {name: why for name in (*MODULES, *tests) if (why := _failure(name))}
    outcome: Outcome = {"about": about()}
    if found:
        listed = "; ".join(f"{name}: {why}" for name, why in found.items())
        outcome |= {"state": State.FAILED, "why": f"cannot be imported: {listed}"}
    return outcome


def _failure(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001  # a library may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def about() -> dict[str, Any]:
    """Device and versions."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "devices": torch.cuda.device_count(),
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else None,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONS},
    }


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.is_file() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
