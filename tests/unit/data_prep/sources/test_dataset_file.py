"""--dataset_config: every mistake is named, and diffusion-pipe's file means what it means there."""

import json
import math
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cli.parser import main
from data_prep.media.captions import Caption, CaptionFormat, TagShuffle
from data_prep.media.clips import Entry
from data_prep.media.frame_selection import FrameRule
from data_prep.refusals import PrepError
from data_prep.sources.dataset_file import inputs_of
from data_prep.sources.folders import FolderCollection
from data_prep.sources.media_source import Input
from tests.hostile import damaged, mistaken, odd_values
from tests.media_files import image
from tests.tables import table

FILE = {
    "resolutions": [512, [832, 480]],
    "frame_buckets": [1, 33],
    "min_ar": 0.5,
    "max_ar": 2.0,
    "num_ar_buckets": 7,
    "directory": [
        {"path": "photos", "num_repeats": 2.5, "caption_prefix": "a photo of "},
        {"path": "films", "size_buckets": [[832, 480, 33]], "ar_buckets": [1.0, [448, 576]]},
    ],
}


def read(path: Path, **given: Any) -> list[Input]:
    defaults = {"missing_caption": None, "caption_field": "caption", "bucketing": "native"}
    defaults |= {"caption_format": str(CaptionFormat.AUTO), "size_multiple": 16}
    defaults |= {"dataset_config": path, "output_dir": path.parent / "out", "center_crop": True}
    args = Namespace(**{**defaults, **given})
    basis = Input(collection=FolderCollection(root=Path()), frames=FrameRule(stride=4))
    return inputs_of(args, basis)


def problem(tmp_path: Path, text: str, name: str = "all.yaml") -> str:
    (tmp_path / name).write_text(text)
    with pytest.raises(PrepError) as error:
        read(tmp_path / name)
    assert name in str(error.value) and len(str(error.value)) < 1500
    return str(error.value)


@pytest.mark.parametrize(("key", "value", "message"), table(__file__, "values"))
def test_a_value_that_a_key_cannot_have(tmp_path: Path, key, value, message) -> None:
    above = problem(tmp_path, f"{key}: {value}\ndirectory: [{{path: a}}]\n")
    inside = problem(tmp_path, f"directory:\n- path: a\n  ? {key}\n  : {value}\n")
    assert message in above and message in inside
    assert ", folder a: " in inside or key == "[a]"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "x: &x [*x]\ndirectory: [{path: a}]", "inside its own anchor"),
        ("a.yaml", "resolutions: &x [*x]\ndirectory: [{path: a}]", "own anchor"),
        ("a.yaml", "directory: &x [*x]", "inside its own anchor"),
        ("a.yaml", "a: &a {<<: *a}", "a.yaml"),
        ("a.yaml", "[" * 2_000, "nested too deeply"),
        ("a.yaml", "directory: [{path: a, num_repeats: 2, num_repeats: 3}]", "duplicate key"),
        ("a.yaml", "x: !!python/object/apply:os.system [echo]", "apply:os.system is not supported"),
        ("a.yaml", "x: !!int ''", "a.yaml"),
        ("a.yaml", "x: !!timestamp x", "a.yaml"),
        ("a.yaml", "x: 2020-99-99", "a.yaml"),
        ("a.yaml", "directory: a", "needs a list 'directory'"),
        ("a.yaml", "directory: [{path: a}]\ndirectories: [{path: b}]", "key 'directories'"),
        ("a.toml", "x = " + "[" * 20_000, "nested too deeply"),
        ("a.toml", "[[directory]]\npath = 'a'\npath = 'b'", "a.toml"),
        ("a.toml", "num_repeats = inf\n[[directory]]\npath = 'a'", "num_repeats: inf is not"),
        ("a.toml", "resolutions = [1979-05-27]\n[[directory]]\npath = 'a'", "'1979-05-27' is not"),
        ("a.TOML", "[directory]\npath = 'a'", "needs a list 'directory'"),
    ],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in problem(tmp_path, text, name)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "a.toml", tmp_path, tmp_path / "nowhere.yaml"):
        with pytest.raises(PrepError, match="--dataset_config"):
            read(path)


def test_merges_and_anchors_of_one_folder_for_another(tmp_path: Path) -> None:
    text = "directory: [&a {path: a, num_repeats: 2}, {<<: *a, path: b}]"
    (tmp_path / "all.yaml").write_text(text)
    assert [given.repeats for given in read(tmp_path / "all.yaml")] == [2, 2]


def test_paths_are_read_as_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative ones, and those with a `$` in the name of a folder, are seen from the file."""
    monkeypatch.setenv("HOME", "/users/me")
    (tmp_path / "$X").mkdir()
    written = "directory: [{path: ~/a:b, mask_path: ~/m, control_path: [~/c, d]}, {path: $X/new}]"
    (tmp_path / "all.yaml").write_text(written)
    first, second = (one.collection for one in read(tmp_path / "all.yaml"))
    assert isinstance(first, FolderCollection) and isinstance(second, FolderCollection)
    assert first.root == Path("/users/me/a:b") and first.masks.root == Path("/users/me/m")
    assert [one.root for one in first.controls] == [Path("/users/me/c"), tmp_path / "d"]
    assert second.root == tmp_path / "$X/new"
    for text in ("path: s3://b/x", "path: $Y/x", "path: x, mask_path: s3:/b", "path: None"):
        said = problem(tmp_path, f"directory: [{{{text}}}]")
        assert (
            "is an address" in said
            or "replaces $Y here" in said
            or "would be read as the name" in said
        )


def packed(tmp_path: Path, *options: str, toml: str = "", name: str = "set.toml") -> list[Entry]:
    """The plan for three pictures: one with tags, one with an empty text, one without any."""
    for stem in ("tags", "empty", "none_at_all"):
        image(tmp_path / f"in/{stem}.png")
    (tmp_path / "in/tags.txt").write_text("one, two, three")
    (tmp_path / "in/empty.txt").touch()
    (tmp_path / name).write_text(toml)
    out = tmp_path / "out"
    words = ["image", "--output_dir", out, "--split", "1,0,0", "--dataset_config", tmp_path / name]
    assert main([*map(str, words), "--plan", "--overwrite", *options]) == 0
    return [Entry.from_line(line) for line in (out / "plan.jsonl").open()]


def captions(entries: list[Entry]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in entries:
        found.setdefault(Path(entry.source).stem, []).append(entry.refused or entry.caption)
    return found


def test_a_file_of_diffusion_pipe_means_what_it_means_there(tmp_path: Path, capsys) -> None:
    toml = "[[directory]]\npath = 'in'\n"
    texts = {"tags": ["one, two, three"], "empty": [""]}
    assert captions(packed(tmp_path, toml=toml)) == {**texts, "none_at_all": [""]}
    named = packed(tmp_path, "--missing_caption", "filename", toml=toml)
    assert captions(named) == {**texts, "none_at_all": ["none at all"]}
    no = packed(tmp_path, "--missing_caption", "refuse", toml="skip_empty_caption = true\n" + toml)
    assert captions(no) == {**texts, "none_at_all": ["no caption"]}
    capsys.readouterr()
    assert captions(packed(tmp_path, toml="skip_empty_caption = true\n" + toml)) == texts
    assert "ignored: 1 x file without a caption, by skip_empty_caption" in capsys.readouterr().out
    empty = packed(tmp_path, toml="skip_empty_caption = false\n" + toml)
    assert captions(empty) == {**texts, "none_at_all": [""]}
    yaml_form = packed(tmp_path, toml="directory: [{path: in}]", name="set.yaml")
    assert captions(yaml_form) == {**texts, "none_at_all": ["none at all"]}


def test_tags_are_shuffled_as_often_as_the_file_says(tmp_path: Path) -> None:
    toml = "cache_shuffle_num = 12\ncaption_prefix = 'of '\n[[directory]]\npath = 'in'\n"
    found = captions(packed(tmp_path, toml=toml))
    assert found["empty"] == ["of "] * 12 and len(found["tags"]) == 12
    assert {frozenset(text.removeprefix("of ").split(", ")) for text in found["tags"]} == {
        frozenset(("one", "two", "three"))
    }
    assert len(set(found["tags"])) > 2 and captions(packed(tmp_path, toml=toml)) == found
    once = captions(packed(tmp_path, toml="shuffle_tags = true\n[[directory]]\npath = 'in'\n"))
    assert {name: len(texts) for name, texts in once.items()} == dict.fromkeys(found, 1)
    other = "cache_shuffle_num = 3\ncache_shuffle_delimiter = ';'\n[[directory]]\npath = 'in'\n"
    assert captions(packed(tmp_path, toml=other))["tags"] == ["one, two, three"] * 3


def test_orders_of_tags_are_drawn_evenly() -> None:
    shuffle = TagShuffle(count=6000, delimiter=", ")
    texts = [c.text for c in shuffle.of([Caption(text="a, b, c", origin="")], key="k")]
    counts = Counter(texts)
    assert len(counts) == 6 and all(
        abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.values()
    )


def as_toml(value: Any) -> str:
    """TOML of a document: tables inside are inline, and what TOML cannot say is left as JSON."""
    if isinstance(value, dict):
        inside = ", ".join(
            f"{json.dumps(str(key))} = {as_toml(item)}" for key, item in value.items()
        )
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def toml_file(document: Any) -> str:
    fields = document if isinstance(document, dict) else {"x": document}
    return "\n".join(f"{json.dumps(str(key))} = {as_toml(item)}" for key, item in fields.items())


_ODDER = odd_values | st.dates() | st.datetimes() | st.binary(max_size=4) | st.sets(st.integers())
_DOCUMENTS = (
    mistaken(FILE)
    | _ODDER
    | st.sampled_from(sorted(FILE)).flatmap(
        lambda key: _ODDER.map(lambda value: {**FILE, key: value})
    )
)


@given(
    content=_DOCUMENTS.map(lambda document: yaml.dump(document).encode())
    | damaged(yaml.dump(FILE).encode())
)
def test_hostile_dataset_yaml(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    check(tmp_path_factory, "hostile.yaml", content)


@given(
    content=(mistaken(FILE) | odd_values).map(lambda document: toml_file(document).encode())
    | damaged(toml_file(FILE).encode())
)
def test_hostile_dataset_toml(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    check(tmp_path_factory, "hostile.toml", content)


def check(tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    try:
        inputs = read(path)
    except PrepError as error:
        assert name in str(error) and len(str(error)) < 2000
        return
    for given_ in inputs:
        assert 0 < given_.repeats <= 10_000 and isinstance(given_.caption_prefix, str)
        for sizing in given_.sizings:
            assert min(sizing.place(640, 480).size) > 0


def test_the_whole_file_is_good(tmp_path: Path) -> None:
    for name, text in (("a.yaml", yaml.dump(FILE)), ("a.toml", toml_file(FILE))):
        (tmp_path / name).write_text(text)
        photos, films = read(tmp_path / name)
        assert photos.repeats == 2.5 and len(photos.sizings) == 2 and films.frames.buckets == (33,)
