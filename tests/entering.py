"""Entry scripts called many times in one process, which spares each case the seconds of a start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and all that it said."""

    code: int
    said: str

    def error(self) -> str:
        """The one message of a command that was refused; fails the test unless it is just that."""
        assert self.code == 1, self.said
        assert "Traceback" not in self.said, self.said
        assert [line[:6] for line in self.said.splitlines()].count("error:") == 1, self.said
        return self.said[self.said.index("error:") :]


Enter = Callable[..., Outcome]
"""(name of a script in recipes/, or of a module, its arguments ...) -> how it ended."""


def enter(script: str, *arguments: str) -> Outcome:
    """Calls a script's `main` as its command line does.

    Call it in a process of its own: the script ends the process group that other tests share.
    """
    from dit.distributed import entry

    entry.leave = lambda _: entry._stop(0)  # this process goes on
    module = import_module(script if "." in script else f"recipes.{script}")
    main, said = module.main, StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            code = entry.run(lambda: main(arguments))
        except SystemExit as leaving:  # argparse
            code = int(leaving.code or 0)
    return Outcome(code, said.getvalue())
