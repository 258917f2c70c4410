"""A file that is no picture is refused for what it is in truth."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from PIL import Image

from data_prep.media.images import open_image
from data_prep.media.resizing import Fit
from data_prep.media.video_packets import open_video
from data_prep.refusals import Reason, RefusedError


def written(kind: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(content, kind)
    return content.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 123\n"
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(range(256))
FILES = {
    "pointer": (POINTER, Reason.NO_IMAGE, "git lfs pull"),
    "page": (b"\n <!DOCTYPE html><html>404", Reason.NO_IMAGE, "HTML page, probably of a failed"),
    "drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Reason.NO_IMAGE, "SVG"),
    "photo": (HEIC, Reason.NO_IMAGE, "HEIC: convert it to JPEG or PNG"),
    "film": (b"\0\0\0\x18ftypisom" + bytes(99), Reason.NO_IMAGE, "data_prep video"),
    "archive": (gzip.compress(b"x"), Reason.NO_IMAGE, "unpack it"),
    "zeros": (bytes(5000), Reason.NO_IMAGE, "zeros alone"),
    "text": (b"no picture\n", Reason.NO_IMAGE, "it is text"),
    "noise": (bytes(range(7, 256)), Reason.NO_IMAGE, "of another kind"),
    # Cut within the header, where Pillow may know no format any more.
    "jpeg": (written("jpeg")[:12], Reason.DAMAGED, ""),
    "png": (written("png")[:12], Reason.DAMAGED, "header"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_picture_is_instead(name: str, tmp_path: Path) -> None:
    content, reason, words = FILES[name]
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(RefusedError, match=words) as found:
        open_image(path)
    assert found.value.reason == reason


@pytest.mark.parametrize("name", ["pointer", "page", "zeros"])
def test_what_a_video_is_instead(name: str, tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(FILES[name][0])
    with pytest.raises(RefusedError, match=FILES[name][2]) as found, open_video(path):
        pass
    assert found.value.reason == Reason.NO_VIDEO


def test_a_video_that_is_damaged_is_not_called_a_video(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(FILES["film"][0])
    with pytest.raises(RefusedError, match="Invalid data"), open_video(path):
        pass


def test_a_thin_picture_is_refused_for_the_budget_that_scales_it() -> None:
    with pytest.raises(RefusedError, match=r"400 x 9 becomes 213 x 4 .* needs 8.*1024") as found:
        Fit(size_multiple=8, max_pixels=1024).place(400, 9)
    assert found.value.reason == Reason.SCALED_AWAY
    with pytest.raises(RefusedError, match="400 x 7 pixels, and each side needs 8") as found:
        Fit(size_multiple=8, max_pixels=None).place(400, 7)
    assert found.value.reason == Reason.TOO_SMALL
