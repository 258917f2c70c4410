"""Captions are found beside their image, by path, in a documented order."""

import json
from pathlib import Path

import pytest

from data_prep.media.captions import Captions, MissingCaption
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.sources.listing import VIDEOS, list_media


def captions(root: Path, **options) -> Captions:
    defaults = {"field": "caption", "missing": MissingCaption.FILENAME}
    sidecars = list_media(root).sidecars
    return Captions(root=root, sidecars=sidecars, **{**defaults, **options})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "old_cat.jpg").touch()
    (tmp_path / "b" / "old_cat.jpg").touch()
    return tmp_path


def test_the_order_of_precedence(root: Path) -> None:
    def found() -> tuple[str, str]:
        caption = captions(root).all_of("a/old_cat.jpg")[0]
        return caption.text, caption.origin

    assert found() == ("old cat", "the file name")
    (root / "a/old_cat.txt").write_text(" from the text \n")
    assert found() == ("from the text", ".txt")
    (root / "a/old_cat.jpg.txt").write_text("from the longer text")
    assert found() == ("from the longer text", ".txt")
    (root / "a/old_cat.json").write_text(json.dumps({"caption": "from JSON"}))
    assert found() == ("from JSON", ".json")
    (root / "a/old_cat.jpg.json").write_text(json.dumps({"caption": "from longer JSON"}))
    assert found() == ("from longer JSON", ".json")


def test_equal_names_in_two_folders_keep_their_own_captions(root: Path) -> None:
    (root / "a/old_cat.txt").write_text("first")
    (root / "b/old_cat.json").write_text(json.dumps({"caption": "second"}))
    assert captions(root).all_of("a/old_cat.jpg")[0].text == "first"
    assert captions(root).all_of("b/old_cat.jpg")[0].text == "second"


def test_upper_case_endings_and_other_fields(root: Path) -> None:
    (root / "a/old_cat.JSON").write_text(json.dumps({"caption": "no", "usr": "yes"}))
    (root / "b/old_cat.TXT").write_bytes("\ufeffœuf\r\ndur\r\n".encode())
    assert captions(root, field="usr").all_of("a/old_cat.jpg")[0].text == "yes"
    assert captions(root).all_of("b/old_cat.jpg")[0].text == "œuf\ndur"


def test_json_without_the_field_is_never_silently_replaced_by_the_file_name(root: Path) -> None:
    (root / "a/old_cat.json").write_text(json.dumps({"text": "hello", "size": 3}))
    fields = r"no field 'caption'; name one with --caption_field .fields: 'text', 'size'"
    with pytest.raises(RefusedError, match=fields) as no:
        captions(root).all_of("a/old_cat.jpg")[0]
    assert no.value.reason is Reason.BAD_CAPTION
    assert captions(root, field="").all_of("a/old_cat.jpg")[0].text == "old cat"
    (root / "a/old_cat.txt").write_text("but there is a text")
    assert captions(root).all_of("a/old_cat.jpg")[0].text == "but there is a text"


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"caption": 3}', b'{"caption": null}', b"\xff\xfe", b'{"caption": "\\ud800"}'],
)
def test_a_caption_file_that_cannot_be_used_is_refused(root: Path, content: bytes) -> None:
    (root / "a/old_cat.json").write_bytes(content)
    with pytest.raises(RefusedError) as refused:
        captions(root).all_of("a/old_cat.jpg")[0]
    is_null = b"null" in content
    assert refused.value.reason is (Reason.NO_CAPTION if is_null else Reason.BAD_CAPTION)


def test_a_loss_weight_stands_where_the_caption_stands(root: Path) -> None:
    def found() -> tuple[str, float | None]:
        one = captions(root).all_of("a/old_cat.jpg")[0]
        return one.text, one.loss_weight

    (root / "a/old_cat.json").write_text(json.dumps({"caption": "C", "loss_weight": 0.5}))
    assert found() == ("C", 0.5)
    (root / "a/old_cat.txt").write_text("T")
    (root / "a/old_cat.json").write_text(json.dumps({"loss_weight": 3}))
    assert found() == ("T", 3)
    (root / "a/old_cat.json").write_text(json.dumps({"caption": "C", "loss_weight": None}))
    assert found() == ("C", None)
    for weight in (-1, "much", True, [1], 1e7, 10**400):
        (root / "a/old_cat.json").write_text(json.dumps({"caption": "C", "loss_weight": weight}))
        with pytest.raises(RefusedError, match=r"give a number from 0 to 1e\+06") as refused:
            found()
        assert refused.value.reason is Reason.BAD_WEIGHT


def test_an_empty_text_file_is_the_empty_caption(root: Path) -> None:
    (root / "a/old_cat.txt").touch()
    found = captions(root, missing=MissingCaption.REFUSE).all_of("a/old_cat.jpg")[0]
    assert (found.text, found.origin) == ("", ".txt")


def test_what_a_missing_caption_becomes(root: Path) -> None:
    assert captions(root, missing=MissingCaption.EMPTY).all_of("a/old_cat.jpg")[0].text == ""
    with pytest.raises(RefusedError) as refused:
        captions(root, missing=MissingCaption.REFUSE).all_of("a/old_cat.jpg")[0]
    assert refused.value.reason is Reason.NO_CAPTION


def test_the_listing_counts_what_it_leaves_out(root: Path) -> None:
    (root / "a/clip.MP4").touch()
    (root / "a/IMG_1.HEIC").touch()
    (root / "a/.hidden.png").touch()
    (root / ".cache").mkdir()
    (root / ".cache/x.png").touch()
    (root / "README").touch()
    (root / "linked").symlink_to(root / "b")
    (root / "a/B.PNG").touch()
    for name in ("@eaDir", "#recycle", "__MACOSX"):
        (root / "a" / name / "old_cat.jpg").mkdir(parents=True)
        (root / "a" / name / "old_cat.jpg/SYNOPHOTO_THUMB_M.jpg").touch()
    listing = list_media(root)
    assert listing.media == ["a/B.PNG", "a/old_cat.jpg", "b/old_cat.jpg"]
    assert listing.ignored == {
        "*.mp4": 1,
        "*.heic (convert them to JPEG or PNG)": 1,
        "hidden": 2,
        "linked folder": 1,
        "no ending": 1,
        "folder @eaDir, which a file server or system adds": 1,
        "folder #recycle, which a file server or system adds": 1,
        "folder __MACOSX, which a file server or system adds": 1,
    }


def test_a_folder_without_images_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(PrepError, match="is not a folder"):
        list_media(tmp_path / "missing")
    (tmp_path / "clip.gif").touch()
    with pytest.raises(
        PrepError, match=r"1 x \*.gif \(animations are not read as clips; convert them to MP4"
    ):
        list_media(tmp_path, VIDEOS, option="--video_dir")
    (tmp_path / "clip.gif").rename(tmp_path / "clip.mp4")
    with pytest.raises(PrepError, match=r"holds no image \(it holds 1 x \*.mp4\).*\.jpg"):
        list_media(tmp_path)
