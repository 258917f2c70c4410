"""Checks the imports of the rows, reports versions of packages, and runs tests."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import chdir, suppress
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.gpu.plan import ROOT, Row

MODULES = (
    *("torch", "triton", "megatron.core", "megatron.energon", "dit.train.trainer"),
    *("measuring.padded", "diffusers.models.transformers.transformer_cosmos"),
    *("pytest", "pytest_timeout", "hypothesis"),
)
"""Modules that rows import. Each imports many others, so an error names the missing package."""
_VERSIONS = ("torch", "triton", "nvidia-cudnn-frontend", "megatron-core", "megatron-energon")
_VERSIONS += ("numpy", "diffusers")


def check_imports(_row: Row, *, report: Callable[[Any], None], **settings: Any) -> str:
    """Reports the machine's packages and device, and tries to import all modules that rows need.

    Returns an error's text that names the modules that cannot be imported; empty if all can.
    """
    tests = [f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    failed = []
    for module in (*MODULES, *tests):
        try:
            import_module(module)
        except Exception as error:  # noqa: BLE001  # a library may raise anything
            failed.append(f"{module}: {type(error).__name__}: {error}")
    report(settings | _about())
    return f"cannot be imported: {'; '.join(failed)}" if failed else ""


def _about() -> dict[str, Any]:
    """Date, versions, commit and device; the commit is None if there is no repository."""
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
    """A pytest plugin that reports the result of each test as soon as the test ends."""

    def __init__(self, report: Callable[[Any], None]):
        self.report, self.failed = report, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return  # of its fixtures, or of its file
        said = report.longrepr[2] if report.skipped else report.longreprtext.strip()
        why = "" if report.passed else f": {said.splitlines()[-1]}"
        self.report({report.nodeid: f"{report.outcome}{why}"})
        if report.failed:
            self.failed.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def run_tests(row: Row, *, report: Callable[[Any], None], **_: Any) -> str:
    """Runs the tests that `row` selects, and reports each result by the test's name.

    Returns an error's text; empty if all pass.
    """
    import pytest

    plugin = _Reports(report)
    flags = ["-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    with chdir(ROOT):
        code = pytest.main(["tests/gpu", "-k", row.tests, *flags], plugins=[plugin])
    if plugin.failed:
        return f"{len(plugin.failed)} tests failed: {', '.join(plugin.failed)}"
    return "" if code == pytest.ExitCode.OK else f"pytest: {code!r}"
