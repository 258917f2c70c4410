"""`pytest tests/gpu` in a process of its own -> how many passed, and which failed why."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_run.install import ROOT
from gpu_run.schedule import Outcome, State
from gpu_run.worker import kill_group, tail


def run_tests(seconds: float, *, environment: dict[str, str], log: Path) -> Outcome:
    """Runs them for at most so many seconds."""
    size = log.stat().st_size if log.exists() else 0
    file = log.with_name("tests_gpu.xml")
    file.unlink(missing_ok=True)
    flags = ["-v", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={file}"]
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "tests/gpu", *flags],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_group(process)
        why = f"took longer than {seconds:.0f} s"
        return {"state": State.ENDED, "why": why, "log": tail(log, after=size)}
    if not file.is_file():
        why = f"pytest ended with exit code {process.returncode} and no report"
        return {"state": State.FAILED, "why": why, "log": tail(log, after=size)}
    return counted(file) | ({"log": tail(log, after=size)} if process.returncode else {})


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
