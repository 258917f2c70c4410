"""Proofs that several processes make together: functions of a worker, all in one launch a size.

A worker is a script that calls its functions by name, and writes what they return on the first rank
(`tests/distributed/shares_worker.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.launching import ROOT, own_words, run

Proof = tuple[int, str, dict[str, Any]]
"""Ranks, function and its settings."""


def launch(folder: Path, worker: str, proofs: Mapping[str, Proof], **env: str) -> None:
    """Makes all proofs; more ranks come first, for fewer load what they save in `folder`.

    Where `env` has what a library reads when it is imported, it has PYTHON_EXEC=sys.executable, and
    the ranks import by themselves.
    """
    for ranks, names in _by_ranks(proofs):
        asked = json.dumps([proofs[name][1:] for name in names])
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        line = [sys.executable, *launcher, str(ROOT / worker), str(folder), asked]
        done = run(line, timeout=400, env={"PYTHONPATH": str(ROOT), **env})
        assert done.returncode == 0, done.stdout + own_words(done.stderr)


def results(folder: Path, proofs: Mapping[str, Proof]) -> dict[str, Any]:
    """What each proof has found."""
    found = {}
    for ranks, names in _by_ranks(proofs):
        of_these = json.loads((folder / f"results_{ranks}.json").read_text())
        found |= dict(zip(names, of_these, strict=True))
    return found


def _by_ranks(proofs: Mapping[str, Proof]) -> list[tuple[int, list[str]]]:
    sizes = sorted({ranks for ranks, *_ in proofs.values()}, reverse=True)
    return [(size, [n for n, (ranks, *_) in proofs.items() if ranks == size]) for size in sizes]
