"""Any image file becomes upright RGB of a size that patches fill, or is refused with a reason."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from data_prep.media.images import image_endings, open_image, probe_image, to_rgb, to_video
from data_prep.media.resizing import Fit, Placement
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.sampling.given_pictures import read_picture

RNG = np.random.default_rng(0)
COLOURS = Image.fromarray(RNG.integers(0, 256, (40, 30, 3), dtype=np.uint8))
GREY = COLOURS.convert("L")

SAVED = {  # ending -> how it is saved
    "avif": {},
    "bmp": {},
    "gif": {},
    "jp2": {},
    "jpg": {"quality": 90},
    "pcx": {},
    "png": {},
    "ppm": {},
    "tga": {},
    "tif": {},
    "tiff": {"compression": "jpeg"},
    "webp": {"lossless": True},
}


def pixels(path: Path) -> np.ndarray:
    return np.array(to_rgb(open_image(path)))


def generated_from(path: Path) -> np.ndarray:
    """The pixels that generation reads of a given picture, in its own size."""
    height, width, _ = pixels(path).shape
    (picture_3HW,) = read_picture(str(path), height, width, option="--reference")
    return ((picture_3HW + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()


def refusal(path: Path) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        to_rgb(open_image(path))
    return caught.value


def save(image: Image.Image, path: Path, **options) -> Path:
    image.save(path, **options)
    return path


@pytest.mark.parametrize("ending", SAVED)
def test_a_cut_file_is_refused_or_loses_no_pixel(ending: str, tmp_path: Path) -> None:
    if f".{ending}" not in image_endings():
        pytest.skip(f"this build of Pillow reads no {ending}")
    whole = save(COLOURS, tmp_path / f"whole.{ending}", **SAVED[ending])
    expected, content = pixels(whole), whole.read_bytes()
    assert expected.shape == (40, 30, 3)
    cut = tmp_path / f"cut.{ending}"
    for size in [1, *range(8, len(content), max(1, len(content) // 40)), len(content) - 3]:
        cut.write_bytes(content[:size])
        try:
            found = pixels(cut)
        except RefusedError as refused:
            assert refused.reason in (Reason.DAMAGED, Reason.NO_IMAGE)
        else:  # a footer was cut off
            assert size > 0.98 * len(content)
            np.testing.assert_array_equal(found, expected)


MODES = {
    "1": (GREY.convert("1"), "png"),
    "L": (GREY, "png"),
    "LA": (GREY.convert("LA"), "png"),
    "P": (COLOURS.quantize(16), "png"),
    "RGB": (COLOURS, "png"),
    "RGBA": (COLOURS.convert("RGBA"), "png"),
    "CMYK": (COLOURS.convert("CMYK"), "tif"),
    "CMYK jpeg": (COLOURS.convert("CMYK"), "jpg"),
    "YCbCr": (COLOURS.convert("YCbCr"), "tif"),
    "I;16": (Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257), "png"),
    "I": (Image.fromarray(np.asarray(GREY).astype(np.int32) * 257), "tif"),
    "F": (Image.fromarray(np.asarray(GREY).astype(np.float32) / 255), "tif"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    """In generation as in packing."""
    image, ending = MODES[mode]
    found = pixels(save(image, tmp_path / f"a.{ending}"))
    assert found.shape == (40, 30, 3) and found.dtype == np.uint8
    np.testing.assert_array_equal(generated_from(tmp_path / f"a.{ending}"), found)
    grey = mode in ("L", "LA", "I;16", "I", "F")
    expected = np.asarray((GREY if grey else COLOURS).convert("RGB"))
    if mode == "1":
        expected = np.asarray(GREY.convert("1").convert("RGB"))
    if mode == "P":
        expected = np.asarray(COLOURS.quantize(16).convert("RGB"))
    distance = np.abs(found.astype(int) - expected)
    # JPEG loses noise and YCbCr rounds; all others keep every level.
    assert distance.mean() <= {"CMYK jpeg": 40, "YCbCr": 2}.get(mode, 0)


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (8, 8), (200, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 8))
    image.paste((0, 0, 0, 128), (0, 0, 4, 1))
    for ending in ("png", "webp"):
        options = {"lossless": True} if ending == "webp" else {}
        found = pixels(save(image, tmp_path / f"a.{ending}", **options))
        np.testing.assert_array_equal(generated_from(tmp_path / f"a.{ending}"), found)
        assert (found[2:, :4] == 255).all() and (found[:, 4:] == (200, 0, 0)).all()
        assert (found[0, :4] == 127).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([9, 9, 9, 50, 60, 70])
    palette.paste(0, (0, 0, 4, 8))
    for ending in ("png", "gif"):
        found = pixels(save(palette, tmp_path / f"p.{ending}", transparency=0))
        assert (found[:, :4] == 255).all() and (found[:, 4:] == (50, 60, 70)).all()


CORNERS = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 0)]], np.uint8)
QUARTERS = Image.fromarray(CORNERS).resize((32, 16), Image.Resampling.NEAREST)


def oriented(orientation: int) -> np.ndarray:
    """EXIF 2.32, tag 0x0112: where row 0 and column 0 of the file belong."""
    stored = np.asarray(QUARTERS)
    return {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: stored[::-1].transpose(1, 0, 2),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: stored[:, ::-1].transpose(1, 0, 2),
    }[orientation]


def xmp(orientation: int) -> bytes:
    return f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode()


def png_with(kind: bytes, content: bytes, *, behind: bool) -> bytes:
    """A PNG file with one more chunk, before its pixels or behind them."""
    QUARTERS.save(file := io.BytesIO(), "png")
    whole = file.getvalue()
    crc = struct.pack(">I", zlib.crc32(kind + content))
    place = len(whole) - 12 if behind else 33
    chunk = struct.pack(">I", len(content)) + kind + content + crc
    return whole[:place] + chunk + whole[place:]


EXIF = {  # how a picture is saved, by a name that begins with the ending
    "jpg": {"quality": 95, "subsampling": 0},
    "mpo": {"quality": 95, "subsampling": 0, "save_all": True, "append_images": [QUARTERS]},
    "avif": {"quality": 95},
    "webp": {"lossless": True},
    "png": {},
    "tif": {},
    "tif deflate": {"compression": "tiff_adobe_deflate"},
    "tif jpeg": {"compression": "jpeg"},
}
CHUNKS = {  # of PNG files: the kind of a chunk, its content by orientation
    "eXIf": lambda o: b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + bytes([o]) + bytes(7),
    "iTXt": lambda o: b"XML:com.adobe.xmp" + bytes(5) + xmp(o),
}


@pytest.mark.parametrize("name", EXIF)
def test_every_orientation_of_every_format(name: str, tmp_path: Path) -> None:
    """The plan reads headers, packing pixels: both know the same size."""
    ending, is_lossy = name.split()[0], name in ("jpg", "mpo", "avif", "tif jpeg")
    if f".{ending}" not in image_endings():
        pytest.skip(f"this build of Pillow reads no {ending}")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        told = {"tiffinfo": {0x0112: orientation}} if ending == "tif" else {"exif": exif}
        path = save(QUARTERS, tmp_path / f"a.{ending}", **EXIF[name], **told)
        wanted, found = oriented(orientation), pixels(path)
        assert found.shape == wanted.shape
        assert probe_image(path).size == wanted.shape[1::-1]
        assert np.abs(found.astype(int) - wanted).mean() <= (12 if is_lossy else 0)
        np.testing.assert_array_equal(generated_from(path), found)


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_png_is_turned_by_what_stands_behind_its_pixels(kind: str, tmp_path: Path) -> None:
    for orientation in range(1, 9):
        for behind in (True, False):
            content = png_with(kind.encode(), CHUNKS[kind](orientation), behind=behind)
            (path := tmp_path / "a.png").write_bytes(content)
            wanted = oriented(orientation)
            np.testing.assert_array_equal(pixels(path), wanted)
            assert probe_image(path).size == wanted.shape[1::-1]


def test_colours_are_those_of_the_profile(tmp_path: Path) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    turned = srgb.replace("sRGB".encode("utf-16-be"), "GRB.".encode("utf-16-be"))
    for name, other in ((b"rXYZ", b"____"), (b"gXYZ", b"rXYZ"), (b"____", b"gXYZ")):
        turned = turned.replace(name, other)  # red and green change places
    image = Image.new("RGB", (8, 8), (200, 10, 30))
    levels = {}
    for name, profile in (("s", srgb), ("t", turned), ("cut", turned[:200])):
        levels[name] = pixels(save(image, tmp_path / f"{name}.png", icc_profile=profile))[0, 0]
    assert levels["s"].tolist() == levels["cut"].tolist() == [200, 10, 30]
    assert np.abs(levels["t"].astype(int) - (10, 200, 30)).max() <= 2


def test_only_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert probe_image(path).is_animated
    assert (pixels(path) == (255, 0, 0)).all()
    assert not probe_image(save(COLOURS, tmp_path / "still.gif")).is_animated


def test_files_that_are_no_image_have_their_own_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("this is no image")
    os.mkfifo(tmp_path / "pipe.png")  # opening it would block for ever
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "document.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    reasons = {path.stem: refusal(path).reason for path in tmp_path.iterdir()}
    assert reasons == {
        "empty": Reason.EMPTY,
        "text": Reason.NO_IMAGE,
        "pipe": Reason.UNREADABLE,
        "dangling": Reason.UNREADABLE,
        "document": Reason.NO_IMAGE,
    }
    assert "convert it to JPEG or PNG" in refusal(tmp_path / "document.png").detail


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(path)  # 50 KB on disk
    assert refusal(path).reason is Reason.TOO_LARGE


def test_a_large_scan_is_no_bomb(tmp_path: Path) -> None:
    path = save(Image.new("1", (10_000, 10_000)), tmp_path / "scan.tif", compression="group4")
    assert open_image(path).size == (10_000, 10_000)  # Pillow warns from 89 million pixels


@pytest.mark.parametrize("value", [-1.0, 1.5, float("nan")])
def test_floats_of_unknown_range_are_refused(value: float, tmp_path: Path) -> None:
    image = Image.fromarray(np.full((8, 8), value, np.float32))
    assert refusal(save(image, tmp_path / "a.tif")).reason is Reason.PIXELS


SMALL = st.integers(8, 200)


def cropped_at_its_budget(fit: Fit, width: int, height: int) -> Placement:
    """Scaled to the budget, whatever its whole patches lose."""
    size = fit.scaled(width, height)
    wide, high = (side - side % fit.size_multiple for side in size)
    return Placement(size, (wide, high))


@settings(deadline=None)
@given(
    size=st.tuples(st.integers(1, 5000), st.integers(1, 5000)) | st.tuples(SMALL, SMALL),
    multiple=st.sampled_from([1, 2, 4, 8, 16, 32]),
    budget=st.integers(1024, 10**6) | st.sampled_from([1024, 4096, 16384]) | st.none(),
)
def test_fitting_loses_no_more_than_a_crop_at_the_budget(
    size: tuple[int, int], multiple: int, budget: int | None
) -> None:
    fit = Fit(size_multiple=multiple, max_pixels=budget)
    width, height = fit.scaled(*size)
    if budget is not None:
        assert width * height <= budget or (width, height) == size
        assert budget < (width + 1) * (height + 1) or (width, height) == size
    if min(width, height) < multiple:
        return
    place, before = fit.place(*size), cropped_at_its_budget(fit, *size)
    assert place.lost <= before.lost
    (wide, high), resized = place.size, place.resized
    assert wide % multiple == high % multiple == 0 < wide * high
    assert all(a >= b for a, b in zip(resized, place.size, strict=True))
    if (width, height) == size:  # pictures within the budget keep their scale
        assert place == before
        return
    assert wide * high <= budget
    assert all(a <= b for a, b in zip(resized, size, strict=True))
    # Both sides by one factor, to a pixel of one of them; and no smaller than by a patch a side.
    assert abs(resized[0] * size[1] - resized[1] * size[0]) <= max(size)
    assert wide >= before.size[0] or high >= before.size[1]


@pytest.mark.parametrize(
    ("file", "multiple", "budget", "size"),
    [
        ((136, 128), 8, 1024, (32, 32)),  # a quarter was lost at 32 x 24
        ((128, 136), 8, 1024, (32, 32)),
        ((136, 128), 8, 1000, (24, 24)),
        ((100, 70), 8, 1024, (32, 24)),
        ((1920, 1080), 16, 256**2, (336, 192)),
        ((4000, 3000), 16, 512**2, (576, 432)),
        ((1600, 160), 8, 1024, (80, 8)),
        ((35, 30), 8, 1024, (32, 24)),  # never enlarged
    ],
)
def test_the_size_next_to_the_budget_that_loses_least(file, multiple, budget, size) -> None:
    assert Fit(size_multiple=multiple, max_pixels=budget).place(*file).size == size


def test_scaling_hits_whole_roots() -> None:
    for side in range(2, 200):  # one pixel short is a lost row of patches
        assert Fit(size_multiple=1, max_pixels=64).scaled(8 * side, 8 * side) == (8, 8)


def test_a_picture_smaller_than_a_patch_is_refused() -> None:
    fit = Fit(size_multiple=8, max_pixels=None)
    assert fit.place(8, 8).size == (8, 8)
    with pytest.raises(RefusedError, match="7 x 8 pixels, and each side needs 8"):
        fit.place(7, 8)
    with pytest.raises(RefusedError, match="8000 x 80 becomes 80 x 0 pixels"):
        Fit(size_multiple=8, max_pixels=64).place(8000, 80)
    with pytest.raises(PrepError, match="--max_pixels 63 is less than one patch"):
        Fit(size_multiple=8, max_pixels=63)


def test_pixels_become_numbers_in_minus_one_to_one() -> None:
    image = Image.fromarray(np.array([[[0, 255, 51]]], np.uint8))
    video = to_video(image, colours=3)
    assert video.shape == (3, 1, 1, 1)
    np.testing.assert_allclose(video.flatten(), [-1, 1, -0.6], atol=1e-6)
    assert to_video(COLOURS, colours=1).shape == (1, 1, 40, 30)


def test_a_large_picture_is_scaled_as_pillow_scales() -> None:
    fitted = Fit(size_multiple=4, max_pixels=300).place(*COLOURS.size).apply(COLOURS)
    expected = COLOURS.resize((12, 16), Image.Resampling.LANCZOS)
    assert fitted.tobytes() == expected.tobytes()
    content = io.BytesIO()
    fitted.save(content, "png")
    assert Image.open(content).size == (12, 16)
