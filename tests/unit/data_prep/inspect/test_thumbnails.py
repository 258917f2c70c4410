"""Pages of a plan and of a dataset show the pixels of the shards, for every sample."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from data_prep.cli.parser import main
from data_prep.inspect import dataset_page, html_pages
from data_prep.inspect.duplicates import looks_of
from data_prep.inspect.html_pages import PageRoom, Thumbnail, side_for, thumbnail, with_controls
from data_prep.inspect.read_shards import inspect_shard
from dit.codecs.dataset_card import read_card
from dit.codecs.vae import Pixel, codec_of_card
from tests.media_files import image, video


def rows_of(page: Path) -> dict[str, dict[str, Any]]:
    """The listed samples of a page by their names."""
    (listed,) = re.findall(r'id="rows">(.*?)</script>', page.read_text(), re.DOTALL)
    return {row["name"]: row for row in json.loads(listed)}


def pixels(uri: str) -> np.ndarray:
    """[F, H, W, 3] of a data URI."""
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as opened:
        frames = []
        for number in range(getattr(opened, "n_frames", 1)):
            opened.seek(number)
            frames.append(np.asarray(opened.convert("RGB")))
    return np.stack(frames)


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """Pictures that a browser would show otherwise than they are packed, two alike, and a clip."""
    root = tmp_path / "in"
    image(root / "small.png", 32, 24, seed=1)
    image(root / "large.png", 320, 240, seed=2)
    turned = Image.open(image(root / "turned.png", 40, 24, seed=3))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(root / "turned.png", exif=exif)
    clear = np.dstack([np.full((24, 32, 3), 90, np.uint8), np.zeros((24, 32), np.uint8)])
    clear[6:18, 8:20, 3] = 255
    Image.fromarray(clear).save(root / "clear.png")
    Image.open(root / "small.png").save(root / "twin.png")
    image(tmp_path / "more/small.png", 32, 24, seed=1)
    video(root / "clip.mp4", 5)
    (root / "broken.png").write_bytes(b"")
    return root


def run(media: Path, out: Path, *options: str) -> int:
    file = media.parent / "all.yaml"
    folders = [{"path": "in"}, {"path": "more", "num_repeats": 3}]
    file.write_text(yaml.safe_dump({"directory": folders}))
    given = ["--dataset_config", str(file), "--output_dir", str(out), "--max_pixels", "1024"]
    given += ["--max_bad_fraction", "0.5", "--split", "1,0,0", "--num_workers", "0"]
    return main(["video", *given, *options])


def test_a_plan_shows_what_is_then_packed(
    media: Path, tmp_path: Path, capsys, read_samples: Callable
) -> None:
    """To the pixel, and the page of the dataset shows the same; so do both count what is alike."""
    out, page = tmp_path / "out", tmp_path / "inspect.html"
    assert run(media, out, "--plan") == 0
    planned = rows_of(out / "plan.html")
    (alike,) = re.findall("planned: near (.*)", capsys.readouterr().out)
    assert run(media, out) == 0
    capsys.readouterr()
    assert main(["inspect", str(out), "--html", str(page)]) == 0
    assert re.findall("near (.*)", capsys.readouterr().out) == [alike]
    assert alike == "duplicates: 5 samples look alike, in 1 group (compared by pixels)"

    codec, samples = codec_of_card(read_card(out)), read_samples(out)
    packed = {name: row for name, row in planned.items() if "refused" not in row}
    assert set(packed) == set(samples) and len(packed) == 7
    for name, row in packed.items():
        made_FHW3 = codec.decode(samples[name]["latent"]).numpy()
        np.testing.assert_array_equal(pixels(row["picture"])[0], made_FHW3[0])
        assert ("clip" in row) == (len(made_FHW3) > 1)
        inspected = rows_of(page)[name]
        assert [row.get(n) for n in ("picture", "clip")] == [
            inspected.get(n) for n in ("picture", "clip")
        ]
    assert pixels(packed["in/clip.mp4"]["clip"]).shape == (5, 24, 32, 3)
    shard = "train/shard-000000.tar"
    compared = inspect_shard(out, shard, expected=9, exact=codec)
    assert not compared.problems
    for sample in compared.seen:
        shown = packed[sample.source]
        ends_FHW3 = torch.from_numpy(pixels(shown["picture"])).float() / 127.5 - 1
        if "clip" not in shown:
            assert sample.looks == looks_of(ends_FHW3.mean(-1))
    assert "picture" not in planned["in/broken.png"]


def test_a_quick_plan_shows_some_and_no_originals(media: Path, tmp_path: Path, monkeypatch) -> None:
    from data_prep.planning import plan_page

    monkeypatch.setattr(plan_page, "_PICTURES", 3)
    assert run(media, tmp_path / "out", "--plan=quick") == 0
    page = tmp_path / "out/plan.html"
    rows = rows_of(page)
    shown = [name for name, row in rows.items() if "picture" in row]
    assert 0 < len(shown) <= 3 < len(rows) and all("file" in row for row in rows.values())
    said = f"{len(shown)} of 7 samples have a picture: --plan=quick decodes no others"
    assert said in page.read_text()


def test_a_slow_codec_shows_some_of_each_shard(tmp_path: Path, capsys, monkeypatch) -> None:
    """A network may take minutes for each sample; latents are compared without it."""
    out, page = tmp_path / "out", tmp_path / "page.html"
    options = ["--num_samples", "60", "--shard_size", "20", "--split", "1,0,0"]
    assert main(["digits", "--output_dir", str(out), *options]) == 0
    assert main(["inspect", str(out), "--html", str(page)]) == 0
    assert sum("picture" in row for row in rows_of(page).values()) == 60

    monkeypatch.setattr(Pixel, "is_exact", False)
    monkeypatch.setattr(dataset_page, "_DECODING_S", 0.0)
    capsys.readouterr()
    assert main(["inspect", str(out), "--html", str(page)]) == 0
    rows = [row for row in rows_of(page).values() if "picture" in row]
    assert {row["facts"].split(", ")[1] for row in rows} == {
        f"train/shard-{number:06d}.tar" for number in range(3)
    }
    assert len(rows) == 3 and "3 of 60 samples have decoded pictures" in page.read_text()
    assert "(compared by latents; --plan compares pixels, and" in page.read_text()


@pytest.mark.parametrize("count", [1, 50, 5_000, 10_000, 50_000, 100_000, 10**7])
def test_thumbnails_of_all_samples_have_room(count: int) -> None:
    side = side_for(count)
    assert html_pages._SIDES[side] * min(count, 100_000) <= html_pages.PAGE_BYTES
    larger = [size for one, size in html_pages._SIDES.items() if one > side]
    assert all(size * count > html_pages.PAGE_BYTES for size in larger)


def test_a_page_takes_pictures_before_clips_and_says_no_more() -> None:
    room = PageRoom(pictures=250, clips=150)
    one = Thumbnail(picture=bytes(100), clip=bytes(100))
    assert room.take(one) == one
    assert room.take(one) == Thumbnail(picture=bytes(100))
    assert room.take(one) is None and room.take(None) is None
    assert (room.shown, room.pictures, room.clips) == (2, 50, 50)


def test_a_clip_with_a_gap_of_days_has_a_thumbnail() -> None:
    frames_FHW3 = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    with Image.open(io.BytesIO(thumbnail(frames_FHW3, side=96, seconds=1e6).clip)) as clip:
        assert getattr(clip, "n_frames") == 2  # noqa: B009


def test_long_clips_show_frames_of_all_their_length() -> None:
    shown = html_pages.frames_shown(81)
    assert len(shown) == 16 and shown[0] == 0 and shown[-1] == 80
    frames_FHW3 = np.stack([np.full((200, 300, 3), 16 * n, np.uint8) for n in range(16)])
    one = thumbnail(frames_FHW3, side=96, seconds=5.0)
    with Image.open(io.BytesIO(one.clip)) as clip:
        assert (clip.size, getattr(clip, "n_frames")) == ((96, 64), 16)  # noqa: B009
        clip.load()
        assert clip.info["duration"] in (312, 313)  # milliseconds of a frame


def test_controls_stand_at_the_left() -> None:
    """A video frame by frame, a picture beside every frame; one of another height is left out."""
    target_FHW3 = np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(2, 1).repeat(3, 2)
    target_FHW3 = target_FHW3.repeat(3, 3)
    video_FHW3, picture_1HW3 = target_FHW3 + 10, np.full((1, 2, 1, 3), 99, np.uint8)
    lower_1HW3 = np.zeros((1, 1, 3, 3), np.uint8)
    found_FHW3 = with_controls(target_FHW3, [video_FHW3, picture_1HW3, lower_1HW3])
    assert found_FHW3.shape == (4, 2, 7, 3)
    for frame, found_HW3 in enumerate(found_FHW3):
        wanted = [frame + 10] * 3 + [99] + [frame] * 3
        assert found_HW3[..., 0].tolist() == [wanted, wanted]
    assert np.array_equal(with_controls(target_FHW3, []), target_FHW3)
