"""Serves the report of runs in progress over HTTP; the report is made anew when their files change.

GET /    the page; 304 if the browser has this version
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from dit.report.local_server import LocalHandler, LocalServer
from dit.report.page import message_page, page
from dit.report.reading import ReportError, read_begun

REFRESH_S = 10
"""Seconds after which an open page asks for a new version."""
_AGAIN = f"this page looks again every {REFRESH_S} seconds"
_SHARE = 0.05
"""Largest fraction of time spent on making pages, because the machine may be training."""
_WRITTEN = ("metrics.jsonl", "environment.jsonl", "config.yaml", "validation_generation")


class ReportServer(LocalServer):
    """A server of the report on run folders; the report is made when a browser asks for it."""

    def __init__(self, host: str, port: int, runs: Sequence[Path], samples: Sequence[Path] = ()):
        super().__init__(host, port, _ReportHandler)
        self._runs, self._samples = runs, samples
        self._one_at_a_time = Lock()
        self._content, self._files, self._again_at = b"", "", 0.0

    def content(self) -> bytes:
        """The report as HTML, encoded; the last one is returned again if no files have changed.

        The last one is also returned until the time spent on making it is at most `_SHARE` of the
        time since.
        """
        with self._one_at_a_time:
            files = self._state()
            start = time.monotonic()
            if not self._content or (files != self._files and start >= self._again_at):
                self._content, self._files = self._made(), files
                end = time.monotonic()
                self._again_at = end + (end - start) / _SHARE
            return self._content

    def _made(self) -> bytes:
        try:
            runs, missing = read_begun(self._runs)
            if not runs:
                raise ReportError("; ".join(map(str, missing)))
            notes = [f"{error}; {_AGAIN}" for error in missing]
            text = page(runs, samples=self._samples, notes=notes, refresh_s=REFRESH_S)
        except ReportError as error:  # no run has begun
            names = ", ".join(folder.name for folder in self._runs)
            text = message_page(names, f"{error}; {_AGAIN}", refresh_s=REFRESH_S)
        return text.encode("utf-8", errors="replace")

    def _state(self) -> str:
        files = [folder / name for folder in self._runs for name in _WRITTEN]
        files += [folder / "samples.json" for folder in self._samples]
        found = [file.stat() if file.exists() else None for file in files]
        return str([(one.st_size, one.st_mtime_ns) if one else None for one in found])


class _ReportHandler(LocalHandler):
    server: ReportServer  # type: ignore[assignment] # which the base class does not know

    def do_GET(self) -> None:  # noqa: N802  http.server's name
        with self.answering():
            self._get()

    def _get(self) -> None:
        if not self.is_ours():
            return
        if self.path != "/":
            self.refuse(404, f"there is no {self.path[:80]} here; the page is /")
            return
        content = self.server.content()
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        kind = "text/html; charset=utf-8"
        if self.headers.get("If-None-Match") == tag:
            self.head(304, kind=kind, tag=tag)
            return
        self.head(200, kind=kind, length=len(content), tag=tag)
        self.wfile.write(content)
