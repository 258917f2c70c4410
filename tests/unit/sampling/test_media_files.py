"""Pictures and videos on disk say what was made, and read back as it was."""

import json
import math
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dit.sampling.commands.options import GenerationOptions
from dit.sampling.media_files import (
    Picture,
    false_colours,
    make_folder,
    report_written,
    write_media,
)

SETTINGS = {"fps": 24.0, "num_steps": 3}


def _smooth(frames: int, height: int, width: int) -> np.ndarray:
    """A ramp that moves with time: what a video codec keeps."""
    f, y, x = np.mgrid[:frames, :height, :width]
    levels = 40 + 20 * f + 60 * y / height + 40 * x / width
    return np.repeat(levels[..., None], 3, axis=-1).astype(np.uint8)


def _picture(video: np.ndarray, prompt: str, seed: int = 4, **settings: float) -> Picture:
    made = SETTINGS | settings
    return Picture(frames_FHW3=video, prompt=prompt, seed=seed, settings=made)


@pytest.mark.parametrize(("height", "width"), [(16, 32), (9, 15), (1, 1)])
@pytest.mark.parametrize("fps", [24.0, 12.5, 30000 / 1001, 7.0])
def test_a_video_reads_back(tmp_path, height, width, fps):
    video = _smooth(5, height, width)
    write_media([_picture(video, "a ramp", fps=fps)], tmp_path)
    with av.open(str(tmp_path / "00000.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.pix_fmt == "yuv420p"  # what every player shows
        assert stream.average_rate == Fraction(fps).limit_denominator(1001)
        read = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    # 4:2:0 needs even sides; what is added repeats the edge.
    even = np.pad(video, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), "edge")
    assert read.shape == even.shape
    assert np.abs(read.astype(int) - even).mean() < 6


def test_a_video_says_what_its_colours_are(tmp_path):
    """Players guess where a file does not: BT.601 for small videos, BT.709 for large ones."""
    red, green, blue = 200, 40, 30
    video = np.broadcast_to(np.uint8([red, green, blue]), (2, 64, 64, 3))
    write_media([_picture(video, "red")], tmp_path)
    with av.open(str(tmp_path / "00000.mp4")) as container:
        frame, codec = next(container.decode(video=0)), container.streams.video[0].codec_context
    luma = 16 + 219 * (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255  # ITU-R BT.709, 3
    assert frame.to_ndarray()[8, 8] == pytest.approx(luma, abs=1)
    assert (frame.colorspace, codec.color_primaries, codec.color_trc) == (1, 1, 1)
    assert frame.color_range == 1
    assert frame.to_ndarray(format="rgb24")[8, 8] == pytest.approx([red, green, blue], abs=3)


def test_a_folder_with_a_colon_is_no_protocol_of_ffmpeg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("wan:lora/out")
    make_folder(folder, count=1)
    assert not write_media([_picture(_smooth(2, 8, 8), "a ramp")], folder).lost
    assert (folder / "00000.mp4").stat().st_size


@pytest.mark.parametrize(("fps", "held"), [(1e-5, 0.01), (1e9, 1000)])
def test_a_rate_that_no_file_holds_ends_nothing(tmp_path, fps, held):
    write_media([_picture(_smooth(2, 8, 8), "a ramp", fps=fps)], tmp_path)
    (entry,) = json.loads((tmp_path / "samples.json").read_text())
    with av.open(str(tmp_path / entry["file"])) as container:
        assert float(container.streams.video[0].average_rate) == held
    assert entry["fps"] == fps


def test_pictures_videos_and_the_listing_share_a_folder(tmp_path):
    pictures = [_smooth(1, 7, 5), _smooth(3, 8, 8), _smooth(1, 4, 4)]
    given = zip(pictures, ("a", "b", "a"), (4, 5, 6), strict=True)
    written = write_media(
        [_picture(video, prompt, seed) for video, prompt, seed in given], tmp_path
    )
    assert written.grid == tmp_path / "grid.png"
    assert written.grid.is_file() and not written.lost and not written.notes
    entries = json.loads((tmp_path / "samples.json").read_text())
    assert [entry["file"] for entry in entries] == ["00000.png", "00001.mp4", "00002.png"]
    assert [entry["seed"] for entry in entries] == [4, 5, 6]
    assert all(entry.items() >= SETTINGS.items() for entry in entries)
    picture = Image.open(tmp_path / "00002.png")
    assert np.array_equal(np.array(picture), pictures[2][0])
    assert picture.text["prompt"] == "a"
    assert json.loads(picture.text["settings"]) == {"seed": 6, **SETTINGS}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output_dir .*file/inside cannot be written"):
        make_folder(tmp_path / "file/inside", count=1)


def test_pictures_of_others_are_not_replaced(tmp_path):
    write_media(_dots(2), tmp_path)
    make_folder(tmp_path, count=4)  # those of the generation before are
    for name in ("00003.png", "00009.mp4"):
        (tmp_path / name).write_text("mine")
    make_folder(tmp_path, count=3)
    with pytest.raises(ValueError, match=r"replace: 00003\.png; choose another folder"):
        make_folder(tmp_path, count=4)
    (tmp_path / "samples.json").unlink()
    with pytest.raises(ValueError, match=r"00000\.png, 00001\.png, 00003\.png and 2 more;"):
        make_folder(tmp_path, count=10)


@pytest.mark.parametrize("name", ["samples.json", "grid.png"])
def test_lists_and_grids_of_others_are_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('[{"file": "cat.png"}]')
    with pytest.raises(ValueError, match=rf"replace: {name}; choose another folder"):
        make_folder(tmp_path, count=1)


def test_latents_lie_beside_their_preview(tmp_path):
    latent = torch.randn(4, 2, 3, 5)
    made = Picture(
        frames_FHW3=false_colours(latent),
        prompt="a",
        seed=1,
        settings=SETTINGS,
        latent_CFHW=latent,
    )
    write_media([made], tmp_path)
    (entry,) = json.loads((tmp_path / "samples.json").read_text())
    assert torch.equal(load_file(tmp_path / entry["latent"])["latent"], latent)
    assert made.frames_FHW3.shape == (2, 3, 5, 3)
    for shade, level in ((-9.0, 0), (0.0, 128), (9.0, 255)):
        assert (false_colours(torch.full((1, 1, 2, 2), shade)) == level).all()


def _dots(count: int, prompt: str = "a") -> list[Picture]:
    return [_picture(_smooth(1, 4, 4), prompt, seed) for seed in range(count)]


def test_files_of_the_generation_before_are_removed_and_no_others(tmp_path):
    write_media([*_dots(2), _picture(_smooth(2, 4, 4), "moving")], tmp_path)
    for name in ("00007.png", "notes.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    listed = json.loads((tmp_path / "samples.json").read_text())
    outside = tmp_path / "elsewhere/00001.png"
    outside.write_text("not this one's")
    listed += [{"file": "elsewhere/00001.png"}, {"file": "notes.txt"}, {"file": 3}, 7]
    (tmp_path / "samples.json").write_text(json.dumps(listed))
    said = " ".join(map(str, write_media(_dots(1), tmp_path).notes))
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == [
        *("00000.png", "00007.png", "grid.png", "notes.txt", "samples.json")
    ]
    assert outside.is_file()
    assert "00001.png, 00002.mp4 removed" in said and "00007.png left as they are" in said


@pytest.mark.parametrize("before", [b"", b"\xff[", b"{}", b"[" * 99_999, b'[{"latent": null}]'])
def test_hostile_list_of_the_generation_before_removes_nothing(tmp_path, before):
    (tmp_path / "samples.json").write_bytes(before)
    (tmp_path / "00003.png").write_text("mine")
    assert "00003.png left" in str(write_media(_dots(1), tmp_path).notes[0])
    assert (tmp_path / "00003.png").is_file()


def test_a_grid_that_cannot_be_drawn_costs_nothing_else(tmp_path):
    (tmp_path / "grid.png").mkdir()
    written = write_media(_dots(2), tmp_path)
    assert written.grid is None and not written.lost
    assert "grid.png: Is a directory; " in str(written.notes[0])
    entries = json.loads((tmp_path / "samples.json").read_text())
    assert all((tmp_path / entry["file"]).is_file() for entry in entries) and len(entries) == 2


def test_a_picture_that_cannot_be_written_costs_no_other(tmp_path):
    (tmp_path / "00001.png").mkdir()
    (tmp_path / "00003.mp4").symlink_to("/dev/full")  # a disk without space
    made = [*_dots(3), _picture(_smooth(2, 4, 4), "moving"), *_dots(1)]
    written = write_media(made, tmp_path)
    assert [lost.what for lost in written.lost] == ["sample 1", "sample 3"]
    entries = json.loads((tmp_path / "samples.json").read_text())
    assert [entry["file"] for entry in entries] == ["00000.png", "00002.png", "00004.png"]
    assert written.grid is not None
    with pytest.raises(ValueError, match=r"2 of 5 samples could not be written into .*sample 1"):
        report_written(written, tmp_path, count=5)


def test_a_list_that_cannot_be_written_leaves_the_one_before(tmp_path):
    write_media(_dots(1), tmp_path)
    before = (tmp_path / "samples.json").read_bytes()
    (tmp_path / "samples.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_media(_dots(2), tmp_path)
    assert (tmp_path / "samples.json").read_bytes() == before


@pytest.mark.parametrize("fps", [0, -1, 1e-5, 1e9, math.nan, math.inf])
def test_a_rate_out_of_reason_is_refused_by_name(fps):
    with pytest.raises(ValueError, match=r"--fps \S+ must lie between 0\.01 and 1000 frames"):
        GenerationOptions(fps=fps)
