"""Masks of the loss: pictures by Pillow and videos by PyAV -> weights of the latent's cells."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import Entry, PlannedMask
from data_prep.media.frame_selection import FrameRule
from data_prep.media.resizing import Placement
from data_prep.media.videos import VideoDecoder, timeline
from data_prep.sources.loss_masks import CellSize, MaskFolder
from tests.media_files import image, video

ALL_TRAIN = ("--split", "1,0,0", "--num_workers", "0", "--text_width", "16")


def pack(out: Path, *arguments: object, command: str = "image") -> int:
    return main([command, "--output_dir", str(out), *ALL_TRAIN, *map(str, arguments)])


def mask(path: Path, grey_HW: np.ndarray, mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grey_HW.astype(np.uint8)).convert(mode).save(path)
    return path


def halves(width: int, height: int, grey: int = 255) -> np.ndarray:
    """Black on the left, `grey` on the right."""
    return np.where(np.arange(width) < width // 2, 0, grey)[None].repeat(height, axis=0)


def test_a_mask_is_scaled_and_cropped_like_its_picture(tmp_path: Path, read_samples) -> None:
    """The picture is a mask of itself: cell by cell, they agree as far as filters do."""
    ramp_HW = np.linspace(0, 255, 70)[None, :] * np.linspace(0.5, 1, 51)[:, None]
    mask(tmp_path / "media/deep/a.png", ramp_HW)
    mask(tmp_path / "masks/deep/a.bmp", ramp_HW)
    mask(tmp_path / "media/b.png", halves(32, 16))
    mask(tmp_path / "masks/b.webp", halves(32, 16, 128), "RGB")
    image(tmp_path / "media/c.png", 16, 16)
    image(tmp_path / "media/d.png", 48, 32)
    mask(tmp_path / "masks/d.png", np.array([0, 255] * 24)[None].repeat(32, axis=0))
    options = ("--image_dir", tmp_path / "media", "--mask_dir", tmp_path / "masks")
    options += ("--height", 16, "--width", 24, "--resize_mode", "area", "--pixel_basis", "pixels")
    assert pack(tmp_path / "out", *options) == 0
    found = {Path(name).name: one for name, one in read_samples(tmp_path / "out").items()}
    assert "loss_mask" not in found["c.png"]
    stripes = found["d.png"]["loss_mask"].float()  # of one pixel, half as wide when they are scaled
    torch.testing.assert_close(stripes, torch.full_like(stripes, 0.5), atol=5e-3, rtol=0)
    of_picture = found["a.png"]
    pixels = of_picture["latent"].float()
    weight = of_picture["loss_mask"].float()
    assert weight.shape == (1, *pixels.shape[1:])
    mean, std = (torch.tensor(of_picture[f"latent_{name}"]) for name in ("mean", "std"))
    grey = (pixels * std[:, None, None, None] + mean[:, None, None, None] + 1).mean(0) / 2
    torch.testing.assert_close(weight[0], grey, atol=3e-3, rtol=0)
    of_halves = found["b.png"]["loss_mask"].float().flatten(0, 2).mean(0)
    half = len(of_halves) // 2
    assert (of_halves[:half] == 0).all()
    wanted = torch.full((half,), 128 / 255)
    torch.testing.assert_close(of_halves[half:], wanted, atol=5e-3, rtol=0)


FORMS = {"L": 200, "RGB": 200, "RGBA": 200, "P": 200, "1": 255, "I;16": 200}


@pytest.mark.parametrize("mode", FORMS)
def test_every_form_of_a_picture_gives_its_grey(tmp_path: Path, mode: str) -> None:
    grey_HW = halves(8, 8, FORMS[mode])
    if mode == "I;16":
        Image.fromarray((grey_HW * 257).astype(np.uint16)).save(tmp_path / "a.png")
    else:
        mask(tmp_path / "a.png", grey_HW, mode)
    cells = _read(tmp_path, PlannedMask(path="a.png", stamp=""), keep=())
    assert cells is not None
    wanted = torch.tensor([0, FORMS[mode] / 255]).expand(1, 1, 2, 2)
    torch.testing.assert_close(cells, wanted, atol=1e-3, rtol=0)


def _read(folder: Path, planned: PlannedMask, keep: tuple[int, ...], frames: int = 4):
    entry = Entry(key="k", source="a", keep=keep, mask=planned, tick="1/10")
    place, cell = Placement((8, 8), (8, 8)), CellSize(side=4, frames=frames)
    return MaskFolder(root=folder).read(entry, place, cell, VideoDecoder.PYAV)


def grey_video(path: Path, greys: list[int], size: int = 8) -> Path:
    """A lossless video, each frame of one grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width = stream.height = size
        stream.pix_fmt = "gray"
        for grey in greys:
            frame = av.VideoFrame.from_ndarray(np.full((size, size), grey, np.uint8), "gray")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_frames_of_a_mask_are_those_of_its_medium_and_averaged_in_time(tmp_path: Path) -> None:
    """Nine frames of ten are kept: the first alone, then means of four."""
    greys = [255, 0, 20, 40, 60, 100, 100, 200, 200, 7]
    path = grey_video(tmp_path / "masks/a.mkv", greys)
    film = video(tmp_path / "film/a.mp4", 10, size=(8, 8))
    line = timeline(film)
    (window,) = FrameRule(stride=4).choose(line, seed="")
    folder = MaskFolder(root=tmp_path / "masks")
    planned = folder.find(path.name, (8, 8), line).planned(line, window)
    entry = Entry(key="k", source="a", mask=planned, keep=window.shown)
    assert Entry.from_line(entry.to_line()) == entry
    cells = _read(tmp_path / "masks", planned, keep=window.shown)
    assert cells is not None and cells.shape == (1, 3, 2, 2)
    each = [255, (0 + 20 + 40 + 60) / 4, (100 + 100 + 200 + 200) / 4]
    torch.testing.assert_close(cells[0, :, 0, 0], torch.tensor(each) / 255, atol=5e-3, rtol=0)
    still = PlannedMask(path="b.png", stamp="")
    mask(tmp_path / "masks/b.png", np.full((8, 8), 51))
    cells = _read(tmp_path / "masks", still, keep=window.shown)
    assert cells is not None and cells.shape == (1, 3, 2, 2)
    assert torch.allclose(cells, torch.tensor(0.2))


def test_masks_that_cannot_be_used_are_counted(tmp_path: Path, read_samples, capsys) -> None:
    """Inside the folder of the media, where diffusion-pipe's example has them."""
    for name in "abcd":
        image(tmp_path / f"media/{name}.png", 16, 16, seed=ord(name))
    mask(tmp_path / "media/masks/a.png", halves(16, 16))
    mask(tmp_path / "media/masks/b.png", halves(16, 8))
    (tmp_path / "media/masks/c.png").write_bytes(b"no picture")
    mask(tmp_path / "media/masks/none.png", halves(16, 16))
    config = tmp_path / "dataset.toml"
    config.write_text("[[directory]]\npath = 'media'\nmask_path = 'media/masks'\nnum_repeats = 1\n")
    options = ("--dataset_config", config, "--max_bad_fraction", 0.5)
    assert pack(tmp_path / "out", *options) == 0
    said = capsys.readouterr().out
    assert "2 x mask of the loss cannot be used" in said and "1 x no loss mask of its name" in said
    assert "mask of no file, the first none.png" in said
    lines = (tmp_path / "out/refused.jsonl").read_text().splitlines()
    details = {one["source"]: one["detail"] for one in map(json.loads, lines)}
    assert "b.png: it has 16 x 8 pixels, and its picture 16 x 16" in details["b.png"]
    assert "c.png" in details["c.png"] and "no image" in details["c.png"]
    found = {
        Path(name).name: "loss_mask" in one for name, one in read_samples(tmp_path / "out").items()
    }
    assert found == {"a.png": True, "d.png": False}
    # A mask that changes makes its sample anew, and no other.
    mask(tmp_path / "media/masks/a.png", 255 - halves(16, 16))
    assert pack(tmp_path / "out", *options) == 0
    weight = {Path(n).name: one for n, one in read_samples(tmp_path / "out").items()}["a.png"][
        "loss_mask"
    ]
    assert weight[..., 0].min() == 1 and weight[..., -1].max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--image_dir", "media", "--mask_dir", "nowhere"),
            "--mask_dir nowhere is not a folder; correct the path",
        ),
        (("--image_dir", "media", "--mask_dir", "empty"), "--mask_dir empty holds no"),
        (("--image_dir", "media", "--mask_dir", "twice"), "are both the mask of one file"),
        (("--dataset_config", "x.yaml", "--mask_dir", "twice"), "has masks for --image_dir and"),
        (("--dataset_config", "x.yaml"), "default_mask_file: each file has a mask of its own"),
    ],
)
def test_a_folder_of_masks_says_what_is_wrong(
    tmp_path: Path, monkeypatch, capsys, arguments, message
) -> None:
    monkeypatch.chdir(tmp_path)
    image(Path("media/a.png"), 16, 16)
    Path("empty").mkdir()
    mask(Path("twice/a.png"), halves(16, 16))
    mask(Path("twice/a.bmp"), halves(16, 16))
    Path("x.yaml").write_text("directory: [{path: media, default_mask_file: m.png}]\n")
    assert pack(Path("out"), *arguments) == 1
    assert message in capsys.readouterr().err
