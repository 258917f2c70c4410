"""Programs whose standard streams cannot be written, as shells start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dit.streams import with_streams

START = "import os, sys; from dit.streams import result, with_streams\n"
WORK = (
    START
    + """
def main():
    for number in range(3):
        print("out", number, flush=True)
        print("err", number, file=sys.stderr)
    return 3
sys.exit(with_streams(main))
"""
)
ASKED = (
    START
    + """
def main():
    with result():
        print("asked for " * 20_000)
    return 0
sys.exit(with_streams(main))
"""
)
ALL = [f"{name} {number}" for number in range(3) for name in ("out", "err")]
ERRORS = {
    ">/dev/full": "standard output: No space left on device; free space on its disk",
    ">&-": "standard output: Bad file descriptor; it is closed",
    "| true": "standard output: Broken pipe; whoever read it has ended",
}


def shell(code: str, streams: str, *, setting: str = "") -> tuple[int, list[str], list[str]]:
    """Exit code, and lines of output and errors, of Python with `streams` of a shell."""
    program = f"""{setting} "$0" -c "$1" {streams}; exit ${{PIPESTATUS[0]}}"""
    # The first line of a pipe is written when its reader has ended.
    late = code.replace("def main():", "def main():\n    import time; time.sleep(0.3)")
    words = ["bash", "-c", program, sys.executable, late if "|" in streams else code]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("streams", ERRORS)
def test_the_other_stream_takes_the_lines(streams: str) -> None:
    """Said once where it happens, and again at the end; no line of the work is lost."""
    code, out, err = shell(WORK, streams)
    assert (code, out) == (3, [])
    first, *lines, last = err
    assert first.startswith(f"note: {ERRORS[streams]}") and "Its lines follow here" in first
    assert last.startswith(f"note: lines are missing: {ERRORS[streams]}")
    assert lines == ALL


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-"])
def test_output_takes_the_lines_of_errors(streams: str) -> None:
    code, out, err = shell(WORK, streams)
    assert (code, err) == (3, [])
    assert [line for line in out if not line.startswith("note: ")] == ALL
    assert ["standard error" in line for line in out].count(True) == 2


@pytest.mark.parametrize("code", [WORK, ASKED], ids=["work", "asked"])
@pytest.mark.parametrize(
    "streams", [">/dev/full 2>&1", ">&- 2>&-", ">&- 2>&- <&-", "2>&1 | true", "2>/dev/full >&-"]
)
def test_without_any_stream_the_work_is_done(code: str, streams: str) -> None:
    expected = 3 if code is WORK else int("|" not in streams)
    assert shell(code, streams) == (expected, [], [])


@pytest.mark.parametrize("streams", ERRORS)
def test_what_was_asked_for_and_cannot_be_written_is_one_error(streams: str) -> None:
    """A reader that has enough is none."""
    code, out, err = shell(ASKED, streams)
    assert out == []
    if "|" in streams:
        assert (code, err) == (0, [])
    else:
        assert code == 1 and len(err) == 1
        assert err[0].startswith(f"error: {ERRORS[streams]}")


def test_a_disk_that_has_space_again_gets_later_lines(tmp_path: Path) -> None:
    """Where both streams go into one file, nothing could be said before."""
    refilled = WORK.replace(
        'print("out", number, flush=True)',
        """
        if number == 1:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        print("out", number, flush=True)""",
    )
    limited = refilled.replace(
        "def main():",
        """
def main():
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))""",
    )
    code, _, _ = shell(limited, f">{tmp_path}/log 2>&1")
    assert code == 3
    *lines, first, second = (tmp_path / "log").read_text().splitlines()
    assert lines == ALL[2:]
    assert "standard output: File too large" in first and "standard error: File" in second


def test_a_slow_reader_of_a_stream_that_does_not_block_gets_all() -> None:
    many = WORK.replace("def main():", "def main():\n    os.set_blocking(1, False)")
    many = many.replace('print("out", number, flush=True)', 'print("x" * 200_000, flush=True)')
    code, out, _ = shell(many, "| (sleep 0.5; cat)")
    assert code == 3 and [len(line) for line in out] == [200_000] * 3


def test_the_number_of_a_closed_stream_is_no_file_of_the_work(tmp_path: Path) -> None:
    """What a library prints would be written into that file."""
    printing = f"""
def main():
    kept = open({str(tmp_path / "kept")!r}, "w")
    try:
        os.write(1, b"of a library")
    except OSError:
        return 3
"""
    assert shell(START + printing + "sys.exit(with_streams(main))", ">&-")[0] == 3
    assert (tmp_path / "kept").read_text() == ""


def test_streams_of_somebody_else_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that a notebook or pytest has put in place stay."""
    from dit.streams import keep_streams

    before = sys.stdout, sys.stderr
    keep_streams()
    assert (sys.stdout, sys.stderr) == before


def test_a_folder_that_was_deleted_is_named_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """A process whose folder is gone cannot load MKL, which ends it with words of its own."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    began = list[int]()
    assert with_streams(lambda: began.append(1) or 0) == 1
    assert not began
    said = capfd.readouterr().err
    assert said.startswith("error: the folder in which this command was started was deleted")
    assert "`cd` into a folder" in said
