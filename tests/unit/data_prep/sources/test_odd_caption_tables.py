"""Caption tables and sidecars as strangers make them: one bad row costs no other."""

import csv
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cli.parser import main
from data_prep.media.captions import Captions, MissingCaption
from data_prep.media.clips import Entry
from data_prep.refusals import Reason, RefusedError
from data_prep.sources.caption_tables import CaptionTables, table_format
from data_prep.sources.folders import CaptionOptions, FolderCollection
from data_prep.sources.listing import Ignored
from data_prep.sources.table_rows import rows_of
from tests.hostile import damaged, deep_json, json_bytes
from tests.media_files import image
from tests.unit.data_prep.sources.test_references import pack


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in "abc":
        image(tmp_path / f"in/{name}.png")
    return tmp_path / "in"


def found(root: Path, missing: MissingCaption = MissingCaption.FILENAME) -> dict[str, object]:
    """Captions of each medium by its stem, or why it is refused; and `None`: what was counted."""
    ignored, result = Ignored(), {}
    for medium in FolderCollection(root=root, captions=CaptionOptions(missing=missing)).media(
        ignored
    ):
        stem = medium.source.removesuffix(".png")
        try:
            result[stem] = [text.text for text in medium.captions()]
        except RefusedError as refused:
            assert refused.reason in (Reason.BAD_CAPTION, Reason.NO_CAPTION)
            result[stem] = refused.detail
    return {**result, None: ignored.counts}


DEEP = '{"file_name": "b.png", "caption": ' + "[" * 50_000


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("x.jsonl", "{", "x.jsonl: line 2 is not JSON"),
        ("x.jsonl", "5", "x.jsonl: row 2 names no file in any of the fields file_name"),
        ("x.jsonl", '["b.png"]', "x.jsonl: row 2 names no file"),
        ("x.jsonl", '{"file_name": 7, "caption": "b"}', "x.jsonl: row 2 names no file"),
        ("x.jsonl", DEEP, "x.jsonl: line 2: the JSON is nested too deeply"),
        ("x.jsonl", '{"file_name": "b.png", "caption": "\\ud800"}', "x.jsonl: line 2: the JSON"),
        ("x.jsonl", '{"file_name": "b.png", "caption": 3}', "field 'caption' holds 3"),
        ("x.jsonl", '{"file_name": "b.png", "caption": "a\\u0000b"}', "a NUL character"),
        ("x.csv", "b.png,one, two", "x.csv: line 3 has 3 fields and the first line 2"),
        ("x.csv", "b.png", "has no caption: there is no field 'caption'; name one"),
        ("x.csv", "b.png,a\0b", "a NUL character"),
        ("x.csv", "b.png,a\udce9b", "has bytes that are not UTF-8"),
        ("x.csv", ',"no name"', "x.csv: row 3 names no file"),
    ],
)
def test_a_bad_row_costs_its_own_medium_alone(root: Path, name: str, line: str, why: str) -> None:
    if name == "x.csv":
        lines = ["file_name,caption", "a.png,A", line, "c.png,C"]
    else:
        rows = [json.dumps({"file_name": f"{stem}.png", "caption": stem.upper()}) for stem in "ac"]
        lines = [rows[0], line, rows[1]]
    (root / name).write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    texts = found(root)
    assert texts["a"] == ["A"] and texts["c"] == ["C"] and why in str(texts["b"])


@pytest.mark.parametrize("content", ["5", "null", "[null]", '["a.png"]', '[{"caption": "x"}]', "{"])
@pytest.mark.parametrize("name", ["captions.json", "meta.json", "metadata.json", "x.jsonl"])
def test_a_table_without_rows_refuses_by_name(root: Path, name: str, content: str) -> None:
    (root / name).write_text(content)
    (root / "a.txt").write_text("has its own")
    texts = found(root)
    assert texts["a"] == ["has its own"] and str(texts["b"]).startswith(f"{name}: ")


@pytest.mark.parametrize(
    "text", ["u\u2028v\u0085w", "x" * 200_000, 'a "quoted" $x$', "line\nbreak"]
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.tsv", "captions.json"])
def test_any_text_is_kept_as_it_is(root: Path, name: str, text: str) -> None:
    row = {"file_name": "a.png", "caption": text}
    quoted = '"' + text.replace('"', '""') + '"'
    content = {
        "x.jsonl": json.dumps(row, ensure_ascii=False),
        "x.csv": f"file_name,caption\r\na.png,{quoted}\r\n",
        "x.tsv": f"file_name\tcaption\na.png\t{quoted}",
        "captions.json": json.dumps([row], ensure_ascii=False),
    }[name]
    (root / name).write_text(content, encoding="utf-8-sig", newline="")
    texts = found(root)
    assert texts["a"] == [text] and texts["b"] == ["b"] and not texts[None]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
@pytest.mark.parametrize("head", ["", "sep=;\r\n"], ids=["bare", "sep"])
@given(texts=st.lists(st.text(st.sampled_from('a;,|\t\n" é'), max_size=8), max_size=3))
def test_any_separator_of_a_spreadsheet_is_read(
    separator: str, name: str, head: str, texts: list[str]
) -> None:
    stream = io.StringIO(newline="")
    stream.write(head.replace(";", separator))
    writer = csv.writer(stream, delimiter=separator)
    writer.writerow(["id", "file_name", "text"])
    writer.writerows([n, f"{n}.png", text] for n, text in enumerate(texts))
    rows = rows_of(name, stream.getvalue().encode("utf-8-sig"), "csv")
    assert rows.problem is None
    assert [row.content["text"] for row in rows.by_name.values()] == texts


def test_a_table_without_a_column_of_names_says_so(root: Path) -> None:
    (root / "x.csv").write_text("1;a red, red square\n2;b\n")
    why = (
        "x.csv: its first line names no column file_name, filename, path, name, file, image, video"
    )
    assert str(found(root)["a"]).startswith(f"{why}: ['1;a red', 'red square']; write a first line")


def test_no_message_shows_the_inside_of_the_program(root: Path) -> None:
    """A row with too many fields and without a name."""
    (root / "x.csv").write_text("file_name,text\n,A,B\n")
    why = "x.csv: line 2 has 3 fields and the first line 2; put quotes around a field"
    assert str(found(root)["a"]).startswith(why)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("m.jsonl", '{"file_name": "a.png", "text": null}', "m.jsonl, row 2, has no caption: field"
         " 'text' holds null; write"),
        ("m.jsonl", '{"file_name": "a.png", "cap": [], "text": true}', "m.jsonl, row 2, has no"
         " caption: field 'cap' holds [] and field 'text' holds true; write"),
        ("captions.json", '{"z": "Z", "a.png": null}', "captions.json, row 2, has null as its"
         " caption; write a text"),
        ("metadata.json", '[{"file_name": "z", "text": "Z"}, {"file_name": "a.png", "text": 5}]',
         "metadata.json, row 2, has no caption: field 'text' holds 5; write"),
        ("a.json", '{"caption": null}', "a.json has no caption: field 'caption' holds null; write"),
    ],
)  # fmt: skip
def test_a_caption_that_is_null_is_named_with_its_row(
    root: Path, name: str, content: str, why: str
) -> None:
    """It is missing: refused, or an empty caption where the user says so."""
    first = '{"file_name": "z.png", "text": "Z"}\n' if name == "m.jsonl" else ""
    (root / name).write_text(first + content)
    assert (said := str(found(root)["a"])).startswith(why)
    is_null = "null" in content
    assert said.endswith(", or give --missing_caption empty") == is_null
    empty = found(root, missing=MissingCaption.EMPTY)["a"]
    assert empty == ([""] if is_null else said)


def test_a_field_that_a_caption_file_gives_twice_is_counted(root: Path) -> None:
    (root / "a.json").write_text('{"caption": "first", "caption": "last", "tag": {"x": 1, "x": 2}}')
    (root / "b.json").write_text('{"caption": "one", "tag": {"x": 1, "x": 2}}')
    (root / "c.json").write_text('{"loss_weight": 1, "loss_weight": 2}')
    (root / "c.txt").write_text("text")
    assert pack(root.parent / "out", "--image_dir", root, "--plan=quick") == 0
    planned = map(Entry.from_line, (root.parent / "out/plan.jsonl").read_text().splitlines())
    note = "caption file with a field twice: the last value counts"
    assert {one.caption: note in one.notes for one in planned} == {
        "last": True,
        "one": False,
        "text": True,
    }


def test_a_quote_that_is_never_closed_swallows_nothing(root: Path) -> None:
    (root / "x.csv").write_text('file_name,caption\na.png,A\nb.png,"B\nc.png,C\n')
    texts = found(root)
    assert texts["a"] == ["A"]
    assert "row of line 3 is never closed" in texts["b"] and "line 3" in texts["c"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "captions.json", "a.txt", "a.json"])
def test_other_encodings_are_named(root: Path, name: str, encoding: str) -> None:
    (root / name).write_bytes('{"file_name": "a.png", "caption": "A"}'.encode(encoding))
    assert "UTF-16 or UTF-32; save it as UTF-8" in str(found(root)["a"])


def test_rows_that_match_no_file_are_counted(root: Path, tmp_path: Path, capsys) -> None:
    (root / "film.mp4").touch()
    image(root / "deep/only.png")
    rows = [{"file_name": name, "caption": name} for name in ("./a.png", "only.png", "film.mp4")]
    rows += [{"file_name": name, "caption": "no"} for name in ("A.PNG", "/b.png", "..\\c.png", "a")]
    (root / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "deep/y.csv").write_text("path,caption\nonly.png,1\nonly.png,2\nno\0where,3\n")
    texts = found(root)
    assert texts["a"] == ["./a.png"] and texts["deep/only"] == ["2"]
    lost = "row of a caption table that matches no file, the first 'no\\x00where' in deep/y.csv"
    assert texts[None][lost] == 5
    assert texts[None]["row of deep/y.csv that a later row of the same name replaces"] == 1
    out = tmp_path / "out"
    options = ("--output_dir", str(out), "--image_dir", str(root), "--split", "1,0,0")
    assert main(["image", *options, "--num_workers", "0", "--plan"]) == 0
    assert f"ignored: 5 x {lost}" in capsys.readouterr().out
    assert "matches no file" in (out / "plan.html").read_text()
    assert main(["image", *options, "--num_workers", "0"]) == 0
    assert f"ignored: 5 x {lost}" in capsys.readouterr().out
    assert json.loads((out / "dataset_card.json").read_text())["ignored"][lost] == 5


@pytest.mark.parametrize("later", ["/", "\\"])
def test_of_a_name_that_is_given_twice_the_last_row_counts(root: Path, later: str) -> None:
    image(root / "deep/d.png")
    names = [f"deep{slash}d.png" for slash in ("/\\" if later == "\\" else "\\/")]
    rows = [{"file_name": name, "caption": f"row {n}"} for n, name in enumerate(names)]
    (root / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = found(root)
    assert texts["deep/d"] == ["row 1"]
    assert texts[None] == {"row of x.jsonl that a later row of the same name replaces": 1}


def test_names_and_fields_that_come_twice_are_counted(root: Path) -> None:
    (root / "captions.json").write_text('{"a.png": "A", "a.png": "B", "a.png": "C"}')
    (root / "x.csv").write_text("file_name,caption,caption,,\nb.png,A,B,,\n")
    (root / "y.jsonl").write_text('{"file_name": "c.png", "caption": "A", "caption": "B"}')
    texts = found(root)
    assert (texts["a"], texts["b"], texts["c"]) == (["C"], ["B"], ["B"])
    assert texts[None] == {
        "row of captions.json that a later row of the same name replaces": 2,
        "row of x.csv with a field twice: the last value counts": 1,
        "row of y.jsonl with a field twice: the last value counts": 1,
    }


def test_absolute_paths_and_those_that_return_into_the_folder(root: Path, tmp_path: Path) -> None:
    image(root / "deep/d.png")
    (tmp_path / "link").symlink_to(root)
    names = {"a": str(root / "a.png"), "b": "../in/./b.png", "c": str(tmp_path / "link/c.png")}
    (root / "x.jsonl").write_text(
        "".join(
            json.dumps({"file_name": name, "caption": stem * 2}) + "\n"
            for stem, name in names.items()
        )
    )
    (root / "deep/y.csv").write_text("path,caption\n../a.png,not below\n../deep/d.png,dd\n")
    texts = found(tmp_path / "link")
    assert [texts[stem] for stem in ("a", "b", "c", "deep/d")] == [["aa"], ["bb"], ["cc"], ["dd"]]
    lost = "row of a caption table that matches no file, the first '../a.png' in deep/y.csv"
    assert texts[None] == {lost: 1}


def test_paths_as_windows_writes_them(root: Path) -> None:
    """A file whose own name has such a sign keeps it."""
    image(root / "deep/er/d.png")
    image(root / "deep/e\\f.png")
    names = [".\\a.png", "deep\\er\\d.png", "deep/e\\f.png", "none\\g.png"]
    lines = [json.dumps({"file_name": name, "caption": name[-5]}) for name in names]
    (root / "x.jsonl").write_text("\n".join(lines))
    assert found(root) == {
        **{"a": ["a"], "b": ["b"], "c": ["c"], "deep/er/d": ["d"], "deep/e\\f": ["f"]},
        None: {"row of a caption table that matches no file, the first 'none/g.png' in x.jsonl": 1},
    }


def test_names_without_their_end_belong_to_the_tables_that_use_them(root: Path) -> None:
    for name in ("clip_sample0.png", "clip_sample1.png"):
        image(root / name)
    (root / "v_internvl.json").write_text(json.dumps({"path": "clip", "internvl": "both"}))
    texts = found(root)
    assert texts["clip_sample0"] == texts["clip_sample1"] == ["both"] and not texts[None]


@pytest.mark.parametrize("name", ["a.txt", "a.json", "x.csv"])
def test_a_pipe_is_not_waited_for(root: Path, name: str) -> None:
    os.mkfifo(root / name)
    assert "not a regular file" in str(found(root)["a"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "a.json is not JSON: the JSON is nested too deeply"),
        ("5", "a.json holds 5; write an object with the field 'caption'"),
        ('{"caption": 3}', "has no caption: field 'caption' holds 3; write a text there"),
        ('{"caption": ["x", null]}', "field 'caption' holds ['x', None]"),
        ('{"text": "x"}', "no field 'caption'; name one with --caption_field (fields: 'text')"),
    ],
)
def test_sidecars_say_what_is_wrong(root: Path, content: str, why: str) -> None:
    (root / "a.json").write_text(content)
    texts = found(root)
    assert why in str(texts["a"]) and texts["b"] == ["b"]


def test_a_text_that_no_caption_is_as_long_as(root: Path) -> None:
    with (root / "a.txt").open("wb") as stream:
        stream.truncate(17 << 20)
        stream.write(b"words")
    assert "and a file of captions at most" in str(found(root)["a"])


ROWS = [{"file_name": f"{stem}.png", "caption": f"œuf {stem}"} for stem in "abc"]
_LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
_CELLS = "".join(f'{row["file_name"]},"{row["caption"]}, ""x"""\r\n' for row in ROWS)
_CSV = f"file_name,caption\r\n{_CELLS}".encode()
TABLES = {
    "x.jsonl": damaged(_LINES) | deep_json.map(lambda text: _LINES + b"\n" + text.encode()),
    "x.csv": damaged(_CSV),
    "x.tsv": damaged(_CSV.replace(b".png,", b".png\t").replace(b"name,", b"name\t")),
    "captions.json": json_bytes(ROWS) | json_bytes({row["file_name"]: "x" for row in ROWS}),
    "v_internvl.json": damaged(_LINES) | json_bytes(ROWS[0]),
}


@given(
    table=st.sampled_from(list(TABLES)).flatmap(lambda name: st.tuples(st.just(name), TABLES[name]))
)
def test_hostile_caption_tables(table: tuple[str, bytes]) -> None:
    path, content = table
    media = ["a.png", "deep/b.png", "c.png", "c.jpg"]
    tables = CaptionTables(
        paths=(path,), media=media, caption_field="caption", read=lambda _: content
    )
    captions = Captions(
        root=Path(), sidecars={}, field="caption", missing=MissingCaption.FILENAME, tables=tables
    )
    rows = rows_of(path, content, table_format(path))
    assert all(isinstance(name, str) and name for name in rows.by_name)
    for what, count in tables.unused(lambda _: False).items():
        assert path in what and count > 0
    for source in media:
        try:
            for text in captions.all_of(source):
                text.text.encode()
        except RefusedError as refused:
            assert refused.reason in (Reason.BAD_CAPTION, Reason.NO_CAPTION)
            refused.detail.encode()
            assert path in refused.detail and len(refused.detail) < 2000


@given(content=json_bytes({"caption": "œuf", "size": [1, 2]}) | damaged("un œuf, mollet".encode()))
@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_hostile_sidecars(name: str, content: bytes) -> None:
    captions = Captions(
        root=Path(), sidecars={name: name}, field="caption", missing=MissingCaption.REFUSE,
        read=lambda _: content,
    )  # fmt: skip
    try:
        for text in captions.all_of("a.png"):
            text.text.encode()
    except RefusedError as refused:
        assert refused.reason is Reason.BAD_CAPTION and len(refused.detail) < 2000
        assert name in refused.detail or refused.detail.startswith(name[1:])
