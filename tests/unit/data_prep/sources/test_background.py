"""Transparent media from the command line to the shards; opaque ones, bit for bit as ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.frame_selection import FrameRule
from data_prep.media.resizing import Fit
from data_prep.packing import Packing, PackOptions
from data_prep.planning.splits import SplitFractions
from data_prep.sources.folders import FolderCollection
from data_prep.sources.listing import BOTH
from data_prep.sources.media_source import Input, MediaSource, TokenGrid
from dit.codecs.dataset_card import read_card
from dit.codecs.normalization import Whitening
from dit.codecs.text import ByteTable
from dit.codecs.vae import Pixel, codec_of_card
from tests.media_files import turned_by, video_of

SIZE = (16, 16)
NOTE = "x transparent, on"


def run(out: Path, *arguments: object) -> int:
    always = ("--num_workers", "0", "--split", "1,0,0", "--text_encoder", "bytes")
    return main(["image", "--output_dir", str(out), *always, *map(str, arguments)])


def half_clear(alpha: int = 0) -> Image.Image:
    """Red on the left; on the right a hidden green."""
    image = Image.new("RGBA", SIZE, (255, 0, 0, 255))
    image.paste((0, 255, 0, alpha), (8, 0, *SIZE))
    return image


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """Seven files with transparency, one whose alpha channel is opaque, and one without."""
    folder = tmp_path / "media"
    folder.mkdir()
    frames = {"save_all": True, "append_images": [Image.new("RGBA", SIZE, "blue")]}
    for name, options in {
        "a.png": {}, "b.webp": {"lossless": True}, "c.tif": {}, "moves.gif": frames,
        "moves.png": frames, "moves.webp": frames | {"lossless": True},
    }.items():  # fmt: skip
        half_clear().save(folder / name, **options)
    half_clear(255).save(folder / "opaque.png")
    Image.new("RGB", SIZE, "red").save(folder / "none.png")
    video_of(folder / "clip.mov", [np.asarray(half_clear())] * 2, pix_fmt="rgba")
    return folder


def test_plan_and_summary_count_what_is_transparent(media: Path, tmp_path: Path, capsys) -> None:
    options = ("--image_dir", media, "--video_dir", media)
    for quick, count in (("--plan=quick", 8), ("--plan", 7)):  # headers tell of opaque.png as well
        assert run(tmp_path / "plan", *options, quick) == 0
        assert f"planned: {count} {NOTE} white (--background)" in capsys.readouterr().out
        notes = json.loads((tmp_path / "plan/plan_summary.json").read_text())["notes"]
        assert notes["transparent, on white (--background)"] == count
        assert notes["only the first frame of an animation"] == 3
    assert run(tmp_path / "out", *options) == 0
    assert f"packed: 7 {NOTE} white (--background)" in capsys.readouterr().out


@pytest.mark.parametrize(("background", "right"), [("white", 255), ("black", 0), ("#808080", 128)])
def test_every_medium_is_on_the_background(
    background: str, right: int, media: Path, tmp_path: Path, read_samples
) -> None:
    out = tmp_path / "out"
    options = ("--image_dir", media, "--video_dir", media, "--background", background)
    assert run(out, *options) == 0
    card = read_card(out)
    codec, samples = codec_of_card(card), read_samples(out)
    assert len(samples) == 9
    for name, sample in samples.items():
        found_FHWC = codec.decode(sample["latent"]).numpy()
        wanted = {"opaque.png": (0, 255, 0), "none.png": (255, 0, 0)}.get(Path(name).name)
        assert (found_FHWC[:, :, :8] == (255, 0, 0)).all(), name
        assert (found_FHWC[:, :, 8:] == (wanted or (right,) * 3)).all(), name
    is_said = "--background" in (out / "README.md").read_text()
    assert is_said == ("background" in card["settings"]) == (background != "white")


def test_a_dataset_keeps_its_background(media: Path, tmp_path: Path, capsys) -> None:
    options = ("--image_dir", media)
    assert run(tmp_path / "out", *options) == run(tmp_path / "out", *options) == 0
    assert run(tmp_path / "out", *options, "--background", "black") == 1
    assert "background: None -> '#000000'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path / "other", *options, "--background", "reddish")
    assert "'reddish' is not an opaque colour; give a name, such as" in capsys.readouterr().err


def test_transparent_control_pictures_are_on_it(tmp_path: Path, read_samples, capsys) -> None:
    for folder, picture in (("media", Image.new("RGB", SIZE)), ("before", half_clear())):
        (tmp_path / folder).mkdir()
        picture.save(tmp_path / folder / "a.png")
    out = tmp_path / "out"
    options = ("--image_dir", tmp_path / "media", "--control_dir", tmp_path / "before")
    assert run(out, *options, "--background", "blue") == 0
    assert f"packed: 1 {NOTE} #0000ff" in capsys.readouterr().out
    (sample,) = read_samples(out).values()
    (found_HWC,) = codec_of_card(read_card(out)).decode(sample["reference_latent_0"]).numpy()
    assert (found_HWC[:, 8:] == (0, 0, 255)).all() and (found_HWC[:, :8] == (255, 0, 0)).all()


def test_a_turned_tiff_has_a_mask_of_its_upright_size(tmp_path: Path, capsys) -> None:
    for folder in ("media", "masks"):
        (tmp_path / folder).mkdir()
    stored = Image.new("RGB", (32, 16), "red")
    for orientation in range(1, 9):
        stored.save(tmp_path / f"media/{orientation}.tif", tiffinfo={0x0112: orientation})
        size = (16, 32) if orientation >= 5 else (32, 16)
        Image.new("L", size, 255).save(tmp_path / f"masks/{orientation}.png")
    options = ("--image_dir", tmp_path / "media", "--mask_dir", tmp_path / "masks")
    assert run(tmp_path / "out", *options) == 0
    assert "packed: 8 x loss mask" in capsys.readouterr().out
    for line in (tmp_path / "out/plan.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert (entry["width"] > entry["height"]) == (int(Path(entry["source"]).stem) < 5)


def test_a_picture_that_was_replaced_since_it_was_planned_is_refused(
    media: Path, tmp_path: Path
) -> None:
    options = ("--image_dir", media, "--max_bad_fraction", "0.5")
    assert run(tmp_path / "out", *options, "--plan=quick") == 0
    Image.new("RGB", (32, 16)).save(media / "none.png")
    assert run(tmp_path / "out", *options, "--trust_cache") == 0
    (refused,) = map(json.loads, (tmp_path / "out/refused.jsonl").read_text().splitlines())
    assert refused["reason"] == "file has changed since it was planned"
    assert "16 x 16 pixels, now 32 x 16" in refused["detail"]


def noise(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)


PICTURES = {"RGB": "png", "L": "png", "P": "gif", "1": "bmp", "CMYK": "tif"}
CLIPS = {"png": ("mov", "rgb24"), "ffv1": ("mkv", "bgr0"), "rawvideo": ("avi", "bgr24")}
CLIPS |= {"qtrle": ("mov", "rgb24"), "huffyuv": ("avi", "rgb24"), "utvideo": ("avi", "gbrp")}
PACKED = {  # of the version before --background, with the sizes of now
    "pictures": "ebb6fc74b729e9f6be51cc869e60e27d83584b5d109e83abe3b04335a5f3cd4c",
    "clips": "b74c880fa8a19833487d9aef3fb20cd8cc1a59daffeda310831871dc44e90483",
    "frames": "3cf66e247c48f09ff6ea53c1c64d10a5e9c94f87405975770fedbda9c28b26a9",
}


def opaque_media(folder: Path) -> None:
    """Media without loss, so that their pixels do not depend on the version of a codec."""
    for mode, ending in PICTURES.items():
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(noise(len(mode))).convert("L" if mode == "1" else "RGB")
        picture = picture.point(lambda level: 255 * (level > 99)) if mode == "1" else picture
        picture.convert(mode).save(folder / f"pictures/{mode}.{ending}")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(9)).save(folder / "pictures/turned.png", exif=exif)
    for codec, (ending, pix_fmt) in CLIPS.items():
        path = folder / f"clips/{codec}.{ending}"
        video_of(path, map(noise, range(3)), codec=codec, pix_fmt=pix_fmt)
    turned_by(folder / "clips/png.mov", folder / "clips/turned.mov", (0, 1, -1, 0))


def digest(folder: Path, out: Path, options: PackOptions, rule: FrameRule) -> str:
    """Of all shards, with a whitening that is given, because sums depend on the machine."""
    packing = Packing(
        source=MediaSource(
            inputs=(
                Input(
                    collection=FolderCollection(root=folder, kinds=BOTH),
                    sizings=(Fit(size_multiple=4, max_pixels=500),),
                    frames=rule,
                ),
            ),
            grid=TokenGrid(spatial=4, temporal=1, patch=1),
            colours=3,
        ),
        folder=out,
        codec=Pixel.of(block=4, colours=3),
        whitening=Whitening.identity(48),
        text=ByteTable(width=8),
        options=options,
        settings={},
    )
    packing.run()
    shards = sorted((out / "train").glob("*.tar"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()


def test_opaque_media_are_packed_as_before(tmp_path: Path, options) -> None:
    opaque_media(tmp_path)
    of_all = options(split=SplitFractions.parse("1,0,0"))
    found = {
        "pictures": digest(tmp_path / "pictures", tmp_path / "a", of_all, FrameRule()),
        "clips": digest(tmp_path / "clips", tmp_path / "b", of_all, FrameRule()),
        "frames": digest(tmp_path / "clips", tmp_path / "c", of_all, FrameRule(stills=2)),
    }
    assert found == PACKED
