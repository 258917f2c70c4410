"""What a user gave comes out as it was given: in lines, tables, bars and logs."""

from __future__ import annotations

import io
import logging

import pytest
from rich.table import Table
from rich.text import Text

from dit.console import Console
from dit.progress import progress_on

ODD = "data:ok:1 [bold]x[/bold] :warning: {0} {task} 9%s [link=file:///etc]é[/] \\[red] 1.5 'a'"


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def console(request: pytest.FixtureRequest) -> Console:
    return Console(file=io.StringIO(), force_terminal=request.param, width=240)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_and_tables_are_verbatim(console: Console) -> None:
    console.print(f"{ODD}\ta tab and  two spaces\nsecond line: {ODD}")
    assert shown(console) == f"{ODD}\ta tab and  two spaces\nsecond line: {ODD}\n"
    table = Table(ODD, title=ODD)
    table.add_row(ODD)
    console.print(table)
    assert shown(console).count(ODD) == 5


def test_long_lines_are_not_broken(console: Console) -> None:
    console.print("word " * 200)
    assert shown(console) == "word " * 200 + "\n"


def test_bars_and_what_is_logged_above_them_are_verbatim(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", console.file)
    logger = logging.Logger("of a library")
    with progress_on(console)(f"packing {ODD}", 3, 0) as advance:
        logger.addHandler(logging.StreamHandler())
        logger.warning("written: %s", ODD)
        console.print(f"note: {ODD}")
        advance(3)
    assert f"written: {ODD}\n" in shown(console)
    assert f"note: {ODD}\n" in shown(console)
    assert f"packing {ODD} " in shown(console)


def test_tables_in_a_file_are_wide() -> None:
    console, table = Console(file=io.StringIO()), Table(box=None, show_header=False)
    table.add_row("word " * 20, "more " * 20)
    console.print(table)
    assert shown(console).count("\n") == 1


def test_what_a_terminal_obeys_and_what_an_encoding_lacks_are_escapes() -> None:
    raw = io.BytesIO()
    for encoding in ("utf-8", "ascii"):
        file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
        Console(file=file).print("a\x1b[2Jb\rc\x9bd \udcff é")
        file.detach()
    escaped = r"a\x1b[2Jb\x0dc\x9bd \udcff"
    assert raw.getvalue().decode().splitlines() == [f"{escaped} é", rf"{escaped} \xe9"]


def test_styles_of_our_own_are_kept() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print("[red] is no colour", style="red")
    console.print(Text("bold", style="bold"))
    assert shown(console) == "\x1b[31m[red] is no colour\x1b[0m\n\x1b[1mbold\x1b[0m\n"
