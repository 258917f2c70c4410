"""Whether all that a run on this machine imports is there, which versions, and what tests say."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import chdir, suppress
from datetime import date
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


def check_imports(_part: Part, *, torch_file: str, **settings: Any) -> Outcome:
    """What cannot be imported, and what this machine is."""
    import torch

    if os.path.realpath(str(torch.__file__)) != os.path.realpath(torch_file):
        why = f"torch is that of {torch.__file__}, and the machine's is {torch_file}"
        return {"state": State.FAILED, "why": why, "about": {}}
    tests = [f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    found = {name: why for name in (*MODULES, *tests) if (why := _failure(name))}
    outcome: Outcome = {"about": _about(**settings)}
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


def _about(*, size: str, keys: Sequence[str]) -> dict[str, Any]:
    """What is measured, and on which device."""
    import torch

    cuda, versions = torch.cuda.is_available(), {}
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "size": size,
        "keys": keys,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else None,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _commit() -> str | None:
    """None where there is no git, or no repository."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with suppress(FileNotFoundError):
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None


def run_tests(_part: Part, **_: Any) -> Outcome:
    """How many of tests/gpu pass, and which fail why."""
    import pytest

    with tempfile.TemporaryDirectory() as folder, chdir(ROOT):
        report = Path(folder) / "report.xml"
        flags = ["-v", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code = pytest.main(["tests/gpu", *flags])
        if not report.is_file():
            raise RuntimeError(f"pytest ended with exit code {code} and no report")
        return counted(report)


def counted(report: Path) -> Outcome:
    """The outcome of a report in JUnit's XML; done if nothing failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = {
        f"{case.get('classname')}::{case.get('name')}": fault.get("message") or ""
        for case in cases
        for fault in case
        if fault.tag in ("failure", "error")
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(failures) - skipped, "skipped": skipped}
    found = {**counts, "failed": len(failures), "failures": failures}
    if failures:
        why = f"{len(failures)} tests failed: {', '.join(failures)}"
        return {"state": State.FAILED, "why": why, "found": found}
    return {"state": State.DONE, "found": found}
