"""A real browser for tests of pages: headless Chromium by its DevTools protocol, over a pipe.

https://chromedevtools.github.io/devtools-protocol/ names the methods. A message is JSON that ends
in NUL.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
_WAIT_S = 60.0


class Tab:
    """One page of the browser; `errors` has what its scripts threw or logged as errors."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._rest, self._number = process, b"", 0
        self._session: dict[str, str] = {}
        self._loaded = False
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        end = time.monotonic() + _WAIT_S
        while (answer := self._read(end)).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def look(self, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """From now on the window has this many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[colours])

    def open(self, url: str) -> None:
        """Waits until the page and what it names are loaded."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        end = time.monotonic() + _WAIT_S
        while not self._loaded:
            self._read(end)

    def run(self, script: str) -> Any:
        """The value of a script, or of its promise."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits for a value that is true."""
        end = time.monotonic() + _WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def middle(self, selector: str) -> tuple[float, float]:
        """The place of an element in the window, once it is scrolled there."""
        x, y = self.run(f"""(() => {{ const one = document.querySelector({json.dumps(selector)});
            one.scrollIntoView({{block: "center"}}); const box = one.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
        return x, y

    def click(self, selector: str) -> None:
        """Presses the middle of an element with the mouse."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            press = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", **press)

    def press(self, key: str, *, code: int = 0, text: str = "", modifiers: int = 0) -> None:
        """A key, such as Tab with code 9."""
        for kind in ("keyDown", "keyUp"):
            about = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            written = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, **about, **written)

    def write(self, text: str) -> None:
        """Into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def sideways(self) -> int:
        """Pixels by which the page is wider than its window."""
        root = "document.documentElement"
        return self.run(f"{root}.scrollWidth - {root}.clientWidth")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A screenshot of the window, or of the `whole` page."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            options["clip"] = {**self.call("Page.getLayoutMetrics")["cssContentSize"], "scale": 1}
        shown = self.call("Page.captureScreenshot", **options)
        path.write_bytes(base64.b64decode(shown["data"]))

    def _read(self, end: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\0" not in self._rest:
            ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {_WAIT_S:g} seconds"
            got = os.read(pipe, 1 << 20)
            assert got, "the browser ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        about = message.get("params", {})
        self._loaded |= message.get("method") == "Page.loadEventFired"
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(json.dumps(about["entry"]))
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A page of a browser that keeps its files in `folder`; skips the test without Chromium."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'browser'}"]
    # The browser reads messages from file 3 and writes them to file 4.
    shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh", found, *flags]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        tab = Tab(process)
        try:
            yield tab
        finally:
            tab._session = {}
            tab.call("Browser.close")
            process.wait(30)
