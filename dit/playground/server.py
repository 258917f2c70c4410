"""Serves the page of the playground, and its answers, over HTTP.

GET /          the page
GET /about     the open checkpoints, and the default options
POST /make     a request for a picture; the answer has a line of JSON for each step, and one for the
               picture; a later error is the last line
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from typing import Any

from dit.parsing import cause
from dit.playground.studio import Studio, read_wish
from dit.report.local_server import LocalHandler, LocalServer

_LONGEST = 64 * 1024  # bytes of a request


class PlaygroundServer(LocalServer):
    """The server of the playground; `studio` is set after the address has been bound."""

    studio: Studio

    def __init__(self, host: str, port: int):
        super().__init__(host, port, _Handler)


class _Handler(LocalHandler):
    server: PlaygroundServer  # type: ignore[assignment] # which the base class does not know

    def do_GET(self) -> None:  # noqa: N802  http.server's name
        with self.answering():
            self._get()

    def _get(self) -> None:
        if not self.is_ours():
            return
        if self.path == "/":
            page = files("dit.playground").joinpath("page.html").read_bytes()
            self.answer(200, page, kind="text/html; charset=utf-8")
        elif self.path == "/about":
            self.answer(200, json.dumps(self.server.studio.about()).encode())
        else:
            self.refuse(404, f"there is no {self.path[:80]} here; the page is /")

    def do_POST(self) -> None:  # noqa: N802
        with self.answering():
            self._post()

    def _post(self) -> None:
        if not self.is_ours():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/make":
            self.refuse(404, f"nothing answers a POST to {self.path[:80]}; only /make does")
        # A page of another site would have to ask before it sends this type, and gets no answer.
        elif self.headers.get_content_type() != "application/json":
            self.refuse(
                415,
                f"Content-Type is {self.headers.get_content_type()}; send JSON, as"
                " application/json",
            )
        elif not length.isdecimal() or int(length) > _LONGEST:
            self.refuse(
                413, f"Content-Length is {length!r:.20}; send a number of bytes, at most {_LONGEST}"
            )
        else:
            self._make(self.rfile.read(int(length)))

    def _make(self, body: bytes) -> None:
        studio = self.server.studio
        wish = read_wish(body, weights=studio.weights, variants=len(studio.variants))
        messages = studio.make(wish)
        first = next(messages)
        self.head(200, kind="application/x-ndjson")
        with closing(messages):
            for message in _with_errors(first, messages):
                try:
                    self.wfile.write(json.dumps(message).encode() + b"\n")
                except OSError:  # the page was closed, or the request was stopped on the page
                    return


def _with_errors(
    first: dict[str, Any], others: Iterator[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yields `first`, then `others`; an error that these raise is yielded as the last message."""
    yield first
    try:
        yield from others
    except ValueError as error:
        yield {"error": str(error)}
    except Exception as error:  # noqa: BLE001  the page shows it, and the server goes on
        yield {"error": cause(error)}
