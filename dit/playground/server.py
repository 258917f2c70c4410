"""The page and its answers over HTTP.

GET /          the page
GET /about     what is open, and the usual options
POST /make     a wish; the answer has a line of JSON for each step, and one for the picture
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from dit.playground.requests import read_wish
from dit.playground.studio import Studio

_LONGEST = 64 * 1024  # bytes of a request
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
# Whatever a prompt or a name of a file holds: the page loads nothing and calls nobody else.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PlaygroundServer(ThreadingHTTPServer):
    """Serves one `Studio`."""

    daemon_threads = True

    def __init__(self, host: str, port: int, studio: Studio):
        super().__init__((host, port), _Handler)
        self.studio = studio
        self.only_local = host in ("127.0.0.1", "localhost")

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PlaygroundServer  # type: ignore[assignment] # which the base class does not know

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        if self.path == "/":
            page = files("dit.playground").joinpath("page.html").read_bytes()
            self._answer(200, page, kind="text/html; charset=utf-8")
        elif self.path == "/about":
            self._answer(200, json.dumps(self.server.studio.about()).encode())
        else:
            self._refuse(404, f"there is no {self.path[:80]} here; the page is /")

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/make":
            self._refuse(404, "only /make is asked by POST")
        # No other site's page can send this type without asking first, which nobody answers.
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "send JSON, as application/json")
        elif not length.isdigit() or int(length) > _LONGEST:
            self._refuse(413, f"a request has at most {_LONGEST} bytes, and says how many")
        else:
            self._make(self.rfile.read(int(length)))

    def _make(self, body: bytes) -> None:
        studio = self.server.studio
        try:
            wish = read_wish(body, weights=studio.weights, variants=len(studio.variants))
            messages = studio.make(wish)
            first = next(messages)
        except ValueError as error:
            self._refuse(400, str(error))
            return
        self._head(200, kind="application/x-ndjson")
        for message in _with_errors(first, messages):
            try:
                self.wfile.write(json.dumps(message).encode() + b"\n")
            except OSError:  # the page was closed
                return

    def _is_ours(self) -> bool:
        """Whether the page was called by an address of this machine.

        Another site's name that points to this machine would let its page read the answers.
        """
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.only_local and name not in _LOCAL:
            self._refuse(403, f"call it {self.server.url}; --host lets other names in")
            return False
        return True

    def _refuse(self, status: int, why: str) -> None:
        self._answer(status, json.dumps({"error": why}).encode())

    def _answer(self, status: int, content: bytes, *, kind: str = "application/json") -> None:
        self._head(status, kind=kind, length=len(content))
        self.wfile.write(content)

    def _head(self, status: int, *, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: prompts are nobody's business."""


def _with_errors(
    first: dict[str, Any], others: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """All messages; an error in the middle is the last one."""
    yield first
    try:
        yield from others
    except Exception as error:  # noqa: BLE001  the page shows it, and the server goes on
        yield {"error": f"{type(error).__name__}: {error}"}
