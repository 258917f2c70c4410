"""Serves pages over HTTP, to this machine unless other hosts are allowed.

It is the standard library's server: it serves one person, and needs no installation.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dit.console import Console
from dit.parsing import cause
from dit.system_errors import reason

_LOCAL = ("127.0.0.1", "localhost", "[::1]")
# Whatever a prompt or file name contains, a page loads nothing and sends nothing elsewhere.
_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


class LocalServer(ThreadingHTTPServer):
    """A server of pages on `host` and `port`; port 0 takes any free one.

    Raises:
        ValueError: the address does not exist, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[LocalHandler]):
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            why = reason(error) if isinstance(error, OSError) else "ports are 0 to 65535"
            raise ValueError(
                f"--host {host} --port {port} cannot be served ({why}); {_remedy(error)}"
            ) from error
        self.only_local = host in ("127.0.0.1", "localhost")

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error, unless a browser closed the page while it was sent."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def serve(self, what: str, *, risk: str) -> None:
        """Serves the page until Ctrl-C; prints `risk` if other machines can reach it.

        `what` is the name of the page in the first line.
        """
        console = Console()
        if not self.only_local:
            console.print(risk)
        console.print(f"{what}  {self.url}  (Ctrl-C ends it)")
        with self:
            try:
                self.serve_forever()
            except KeyboardInterrupt:
                console.print("closed")


def _remedy(error: OSError | OverflowError) -> str:
    if isinstance(error, OverflowError) or error.errno in (errno.EADDRINUSE, errno.EACCES):
        return "give another --port, or --port 0 for any that is free"
    return "give --host 127.0.0.1 for this machine alone, or 0.0.0.0 for others, too"


class LocalHandler(BaseHTTPRequestHandler):
    """A request handler; on a local server it answers only requests addressed to this machine.

    Its security policy lets a page load nothing from other addresses.
    """

    server: LocalServer  # type: ignore[assignment] # which the base class does not know
    begun = False
    """Whether the head of the answer has been sent."""

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context whose errors become answers.

        The status is 400 for a ValueError, and 500 for other errors. If an answer has begun, or the
        connection was lost, the error is raised.
        """
        self.begun = False
        try:
            yield
        except Exception as error:
            if self.begun or isinstance(error, ConnectionError):
                raise
            known = isinstance(error, ValueError)
            self.refuse(400 if known else 500, str(error) if known else cause(error))

    def is_ours(self) -> bool:
        """Whether the request may be answered; if not, it is refused with status 403.

        A server of this machine alone answers only requests that name one of its addresses.
        Otherwise the page of another site, whose name points to this machine, could read the
        answers. Other servers answer all requests.
        """
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.only_local and name not in _LOCAL:
            self.refuse(
                403,
                f"this server does not answer requests to {name!r:.100}: open {self.server.url},"
                " or start it with --host to use other names",
            )
            return False
        return True

    def refuse(self, status: int, why: str) -> None:
        self.answer(status, json.dumps({"error": why}).encode())

    def answer(self, status: int, content: bytes, *, kind: str = "application/json") -> None:
        self.head(status, kind=kind, length=len(content))
        self.wfile.write(content)

    def head(self, status: int, *, kind: str, length: int | None = None, tag: str = "") -> None:
        self.begun = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if tag:
            self.send_header("ETag", tag)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because prompts are private."""
