"""Commands that programs tell to type next."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dit.command_line import python


def test_a_shell_with_another_python_is_told_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an environment that is not activated: its Python links to that of the shell."""
    mine, other = tmp_path / "mine/python", tmp_path / "other/python"
    for link in (mine, other):
        link.parent.mkdir()
        link.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(mine))
    for path, said in ((mine, "python"), (other, str(mine)), (tmp_path, str(mine))):
        monkeypatch.setenv("PATH", os.fspath(path.parent))
        assert python() == said
    monkeypatch.chdir(tmp_path)
    assert python() == "mine/python"
