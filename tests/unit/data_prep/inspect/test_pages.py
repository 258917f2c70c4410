"""The list of samples of a page: 100,000 rows in a real browser, from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_prep.inspect import dataset_page, html_pages
from data_prep.inspect.html_pages import Row, write_html
from tests.browser import browser


def rows(count: int) -> list[Row]:
    made: list[Row] = [
        {"name": f"photos/{n}.png", "caption": f"a fox </script> {n}", "bucket": f"{n % 7} x 64"}
        for n in range(count)
    ]
    for number in range(0, count, 1000):
        made[number] |= {"refused": "file is empty", "detail": "0 bytes"}
    return made


def test_a_browser_shows_one_page_of_100_000(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    listed = rows(100_000)
    listed[1]["caption"] = "a long caption " * 500
    write_html(page, "Plan", ["<p>facts</p>"], listed)
    figures = "[...document.querySelectorAll('figure')].map(one => one.textContent)"
    with browser(tmp_path) as tab:
        tab.look(width=390)
        tab.open(f"{page.as_uri()}#q=fox%209&refused=file%20is%20empty")
        shown = tab.run(figures)
        assert len(shown) == 19 and all("file is empty: 0 bytes" in one for one in shown)
        assert any("photos/99000.png" in one and "a fox </script> 99000" in one for one in shown)
        tab.run("location.hash = ''; location.reload()")
        tab.until("document.querySelectorAll('figure').length === 50")
        heights = "[...document.querySelectorAll('figure')].map(one => one.offsetHeight)"
        assert max(tab.run(heights)) < 400  # a long caption scrolls in its place
        tab.click("#after")
        assert "photos/99.png" in tab.run(figures)[-1] and tab.run("location.hash") == "#page=2"
        tab.run("document.getElementById('q').focus()")
        tab.write("99999")
        tab.until("document.querySelectorAll('figure').length === 1")
        milliseconds = tab.run("document.getElementById('list').dataset.milliseconds")
        assert int(milliseconds) < 5000  # about 100 where the machine does nothing else
        assert tab.sideways() == 0 and not tab.errors


def test_a_card_is_read_without_its_long_lists() -> None:
    card = {
        "latent": {"mean": [0.25 * n for n in range(48)], "dtype": "float16"},
        "psnr": {},
        "license": None,
        "sources": ["photos"],
        "settings": {"drop_short": False},
    }
    assert list(dataset_page._facts(card)) == [
        ("latent, mean", "48 values, 0 to 11.75"),
        ("latent, dtype", "float16"),
        ("sources", '["photos"]'),
        ("settings, drop_short", "false"),
    ]


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
