"""Captions from tables: every kind, by path, and never from a namesake."""

import json
from pathlib import Path

import pytest

from data_prep.media.captions import CaptionFormat, MissingCaption
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.sources.folders import CaptionOptions, FolderCollection
from data_prep.sources.listing import BOTH, Ignored
from tests.media_files import image


def found(root: Path, **options) -> dict[str, object]:
    """Captions of each medium, or the reason that it has none."""
    captions = CaptionOptions(**options)
    result = {}
    for medium in FolderCollection(root=root, captions=captions, kinds=BOTH).media(Ignored()):
        try:
            texts = medium.captions()
            result[medium.source] = [text.text for text in texts]
        except RefusedError as refused:
            assert refused.reason in (Reason.BAD_CAPTION, Reason.NO_CAPTION)
            result[medium.source] = refused.detail
    return result


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png", "deep/a.png", "deep/er/c.png"):
        image(tmp_path / name)
    return tmp_path


TABLES = {
    "meta.json": json.dumps([{"file_name": "a.png", "caption": "A"}]),
    "captions.json": json.dumps({"a.png": ["A"]}),
    "videos2caption.json": json.dumps([{"path": "a.png", "cap": "A"}]),
    "x.jsonl": json.dumps({"file_name": "a.png", "internvl": "A"}) + "\n\n",
    "x.csv": 'filename,caption\na.png,"A"\n',
    "x.tsv": "path\tcaption\na.png\tA\n",
    "metadata.jsonl": json.dumps({"file_name": "a.png", "text": "A"}),
    "some_internvl.json": json.dumps({"file_name": "a.png", "internvl": "A"}) + "\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_table(name: str, root: Path) -> None:
    (root / name).write_text(TABLES[name])
    texts = found(root)
    assert texts["a.png"] == ["A"] and texts["b.png"] == ["b"]
    # Two files are called a.png: the bare name is that of the one beside the table.
    assert "several files" in str(texts["deep/a.png"])


@pytest.mark.parametrize("wrapper", ["items", "data"])
def test_meta_json_with_its_list_inside(wrapper: str, root: Path) -> None:
    rows = [{"filename": "deep/er/c.png", "caption": "C", "usr": "U"}]
    (root / "meta.json").write_text(json.dumps({"version": 1, wrapper: rows}))
    assert found(root)["deep/er/c.png"] == ["C"]
    assert found(root, field="usr")["deep/er/c.png"] == ["U"]
    assert "there is no field 'nothing'" in str(found(root, field="nothing")["deep/er/c.png"])


def test_the_nearest_table_wins_and_files_beside_the_medium_before_it(root: Path) -> None:
    (root / "meta.json").write_text(json.dumps({"deep/a.png": "far", "deep/er/c.png": "far"}))
    assert found(root)["deep/a.png"] == ["far"]
    (root / "deep/z.csv").write_text("path,caption\na.png,near\n")
    (root / "deep/captions.json").write_text(json.dumps({"a.png": ["first by name", "two"]}))
    assert found(root)["deep/a.png"] == ["first by name", "two"]
    assert found(root, format=CaptionFormat.CSV)["deep/a.png"] == ["near"]
    assert found(root)["deep/er/c.png"] == ["far"]
    (root / "deep/a.txt").write_text("beside")
    assert found(root)["deep/a.png"] == ["beside"]
    assert found(root, format=CaptionFormat.META_JSON)["deep/a.png"] == ["first by name", "two"]
    assert found(root, format=CaptionFormat.SIDECAR)["deep/er/c.png"] == ["c"]


def test_a_bare_name_reaches_into_folders_where_it_is_the_only_one(root: Path) -> None:
    (root / "meta.json").write_text(json.dumps([{"file_name": "c.png", "caption": "C"}]))
    assert found(root)["deep/er/c.png"] == ["C"]


def test_videos2caption_beside_its_folder(tmp_path: Path) -> None:
    image(tmp_path / "videos/one.png")
    image(tmp_path / "more/one.png")
    rows = [{"path": "one.png", "cap": ["first", "second"]}]
    (tmp_path / "videos2caption.json").write_text(json.dumps(rows))
    texts = found(tmp_path)
    assert texts["videos/one.png"] == ["first", "second"]
    assert "several files" in str(texts["more/one.png"])


def test_captions_may_be_demanded(root: Path) -> None:
    (root / "meta.json").write_text(json.dumps({"a.png": "A"}))
    texts = found(root, missing=MissingCaption.REFUSE)
    assert texts["a.png"] == ["A"] and "--missing_caption" in str(texts["b.png"])


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PrepError, match="is not a folder"):
        found(tmp_path / "nowhere")
