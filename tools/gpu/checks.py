"""Whether all that a run on this machine imports is there, which versions, and what tests say."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, suppress
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.gpu.install import ROOT
from tools.gpu.plan import Row
from tools.gpu.results import Outcome, State

MODULES = (
    *("torch", "triton", "megatron.core", "megatron.energon", "dit.train.trainer"),
    *("measuring.padded", "diffusers.models.transformers.transformer_cosmos"),
    *("pytest", "pytest_timeout", "hypothesis"),
)
"""Each imports much more; the packages that are missing are named, not these."""
_VERSIONS = ("torch", "triton", "nvidia-cudnn-frontend", "megatron-core", "megatron-energon")
_VERSIONS += ("numpy", "diffusers")


def check_imports(_row: Row, *, size: str, keys: Sequence[str], **_: Any) -> Outcome:
    """What cannot be imported, and what this machine is."""
    tests = [f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    found = list(_failures([*MODULES, *tests]))
    about = {"size": size, "keys": keys} | _about()
    if found:
        why = f"cannot be imported: {'; '.join(found)}"
        return {"state": State.FAILED, "why": why, "about": about}
    return {"about": about}


def _failures(modules: Iterable[str]) -> Iterator[str]:
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # noqa: BLE001  # a library may raise anything
            yield f"{module}: {type(error).__name__}: {error}"


def _about() -> dict[str, Any]:
    """What is measured, and on which device; the commit is None where there is no repository."""
    import torch

    cuda, versions = torch.cuda.is_available(), {}
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    commit = os.environ.get("COMMIT")
    with suppress(FileNotFoundError):  # no git
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = commit or subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit or None,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else None,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


class _Reports:
    """A plugin of pytest that keeps and hands on how each test ended, as soon as it has."""

    def __init__(self, report: Callable[[Any], None]):
        self.report, self.found = report, dict[str, str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return  # of its fixtures
        said = report.longrepr[2] if report.skipped else report.longreprtext.strip()
        why = "" if report.passed else f": {said.splitlines()[-1]}"
        self.found[report.nodeid] = f"{report.outcome}{why}"
        self.report({report.nodeid: self.found[report.nodeid]})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.pytest_runtest_logreport(report)


def run_tests(row: Row, *, report: Callable[[Any], None], **_: Any) -> Outcome:
    """How each test ended, by its name; done if none failed."""
    import pytest

    plugin = _Reports(report)
    flags = ["-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    with chdir(ROOT):
        code = pytest.main([*row.keys, *flags], plugins=[plugin])
    failed = [name for name, said in plugin.found.items() if said.startswith("failed")]
    if code == pytest.ExitCode.OK:
        return {"found": plugin.found}
    why = f"{len(failed)} tests failed: {', '.join(failed)}" if failed else f"pytest: {code!r}"
    return {"state": State.FAILED, "why": why, "found": plugin.found}
