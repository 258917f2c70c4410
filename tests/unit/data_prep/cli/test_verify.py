"""What was written is decoded and compared, and shown."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data_prep.cli.parser import main
from dit.codecs.vae import Pixel
from tests.media_files import image, video


@pytest.fixture
def source(tmp_path: Path) -> list[str]:
    image(tmp_path / "in/a.png", 32, 32)
    video(tmp_path / "in/b.mp4", 9)
    given = ["video", "--image_dir", tmp_path / "in", "--video_dir", tmp_path / "in"]
    given += ["--output_dir", tmp_path / "out", "--split", "1,0,0", "--num_workers", 0]
    return [str(word) for word in given]


def rows_of(page: Path) -> list[dict[str, Any]]:
    """The samples that a page lists."""
    (found,) = re.findall('id="rows">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found)


def test_verify_reports_how_far_decoded_pictures_are(source: list[str], capsys) -> None:
    assert main([*source, "--verify"]) == 0
    said = capsys.readouterr().out
    assert "verified: PSNR 99.0 dB on average, 99.0 dB at least, 2 samples" in said
    assert "good" in said


def test_verify_measures_a_codec_that_loses(source: list[str], capsys, monkeypatch) -> None:
    undo = Pixel.decode

    def worse(self: Pixel, latent):
        return (undo(self, latent).int() + 5).clamp(0, 255).byte()

    monkeypatch.setattr(Pixel, "decode", worse)
    assert main([*source, "--verify"]) == 0
    # 5 levels off, some of them cut at white: about 20 log10(255 / 5)
    least = float(capsys.readouterr().out.partition("average, ")[2].partition(" dB")[0])
    assert 34 < least < 34.4


def test_a_page_of_decoded_pictures(source: list[str], tmp_path: Path, capsys) -> None:
    assert main(source) == 0
    page = tmp_path / "new" / "page.html"
    assert main(["inspect", str(tmp_path / "out"), "--html", str(page)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--html", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "it is a folder); give another FILE.html" in said.err
    assert "samples in" not in said.out  # nothing was read before
    (still, moving), text = rows_of(page), page.read_text()
    assert moving["facts"].endswith("[48, 9, 12, 16]") and moving["bucket"] == "64 x 48, 9 frames"
    assert "clip" not in still and still["picture"].startswith("data:image/webp")
    stored = base64.b64decode(moving["clip"].partition("base64,")[2])
    opened: Any = Image.open(io.BytesIO(stored))
    assert opened.format == "WEBP" and opened.n_frames == 9
    assert not re.findall(r"https?://|@import|url\(", text)


def test_plan_page_shows_pictures(source: list[str], tmp_path: Path) -> None:
    assert main([*source, "--plan"]) == 0
    page = tmp_path / "out/plan.html"
    rows, text = {Path(row["name"]).name: row for row in rows_of(page)}, page.read_text()
    assert "Packs" in text and "duration" in text.lower()
    assert all(row["picture"].startswith("data:image/webp") for row in rows.values())
    assert (page.parent / rows["b.mp4"]["file"]).samefile(tmp_path / "in/b.mp4")
    assert "clip" in rows["b.mp4"] and "clip" not in rows["a.png"]
