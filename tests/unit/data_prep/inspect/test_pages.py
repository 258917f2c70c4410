"""The list of samples of a page: 100,000 rows in a real browser, from a file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from data_prep.inspect import html_pages
from data_prep.inspect.html_pages import Row, write_html

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")


def rows(count: int) -> list[Row]:
    made: list[Row] = [
        {"name": f"photos/{n}.png", "caption": f"a fox </script> {n}", "bucket": f"{n % 7} x 64"}
        for n in range(count)
    ]
    for number in range(0, count, 1000):
        made[number] |= {"refused": "file is empty", "detail": "0 bytes"}
    return made


def seen(page: Path, address: str) -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    own = f"--user-data-dir={page.parent / 'browser'}"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", own]
    call = [browser, *flags, f"{page.as_uri()}{address}"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    shown = done.stdout.partition('<div id="list"')[2]
    return shown.partition('<script type="application/json"')[0]


def test_a_browser_shows_one_page_of_100_000(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_html(page, "Plan", ["<p>facts</p>"], rows(100_000))
    shown = seen(page, "#q=fox%209&refused=file%20is%20empty")
    assert shown.count("<figure>") == 19 == shown.count("file is empty: 0 bytes")
    assert "photos/99000.png" in shown and "a fox &lt;/script&gt; 99000" in shown
    first = seen(page, "")
    assert first.count("<figure>") == 50 and "photos/49.png" in first
    (milliseconds,) = re.findall('data-milliseconds="(\\d+)"', first)
    assert int(milliseconds) < 5000  # about 100 where the machine does nothing else


def test_too_many_rows_keep_the_refused_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_pages, "MOST_ROWS", 30)
    every = rows(5000)
    every[4321]["group"] = 1
    write_html(tmp_path / "page.html", "Plan", [], every)
    text = (tmp_path / "page.html").read_text()
    found = json.loads(re.findall('id="rows">(.*?)</script>', text, re.DOTALL)[0])
    assert "30 of 5,000 samples are listed" in text and len(found) == 30
    assert [row["name"] for row in found if row.get("refused")] == [
        f"photos/{n}.png" for n in range(0, 5000, 1000)
    ]
    assert "photos/4321.png" in [row["name"] for row in found]
