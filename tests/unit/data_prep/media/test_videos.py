"""Videos of every container: when frames are shown, those frames upright, damage noticed."""

import json
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from data_prep.cli.parser import main
from data_prep.media.clips import Entry
from data_prep.media.videos import VideoDecoder, frames, timeline
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.codecs.frame_pictures import ENDINGS
from tests.media_files import CODECS, level, number_of, numbered_video, video


def greys(path: Path, keep: tuple[int, ...]) -> list[int]:
    """Grey level of the lower right corner of each frame."""
    return [int(np.asarray(picture)[-4, -4, 1]) for picture in frames(path, keep)]


@pytest.mark.parametrize("ending", CODECS)
def test_every_frame_of_every_container(ending: str, tmp_path: Path) -> None:
    path = video(tmp_path / f"A{ending.upper()}", 23)
    line = timeline(path)
    assert (line.width, line.height, len(line.shown)) == (64, 48, 23)
    assert line.fps == pytest.approx(10) and line.duration == pytest.approx(2.3)
    assert not line.is_uneven
    keep = (line.shown[0], line.shown[7], line.shown[7], line.shown[22])
    assert np.abs(np.subtract(greys(path, keep), [level(i) for i in (0, 7, 7, 22)])).max() <= 2
    assert ending in ENDINGS


@pytest.mark.parametrize("ending", CODECS)
def test_a_cut_video_is_refused_or_has_all_its_frames(ending: str, tmp_path: Path) -> None:
    content = video(tmp_path / f"whole{ending}", 23, faststart=ending == ".mov").read_bytes()
    cut, refused = tmp_path / f"cut{ending}", 0
    for percent in range(1, 100, 7):
        cut.write_bytes(content[: len(content) * percent // 100])
        try:
            line = timeline(cut)
            assert len(line.shown) == 23 and len(greys(cut, line.shown)) == 23
        except RefusedError as error:
            assert error.reason in (Reason.NO_VIDEO, Reason.VIDEO_DAMAGED)
            refused += 1
    assert refused >= 12


def test_damage_inside_is_noticed_when_frames_are_read(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mkv", 23)
    line, content = timeline(path), bytearray(path.read_bytes())
    start, end = len(content) * 6 // 10, len(content) * 8 // 10
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    with pytest.raises(RefusedError):
        timeline(path)
        greys(path, line.shown)


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotated_videos_are_upright(rotation: int, tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 3, rotation=rotation)
    line = timeline(path)
    assert (line.width, line.height) == ((64, 48) if rotation == 180 else (48, 64))
    (picture,) = frames(path, line.shown[:1])
    assert picture.size == (line.width, line.height)
    corners = np.asarray(picture)[:, :, 1].astype(int)[[4, 4, -4, -4], [4, -4, 4, -4]]
    # The bright corner of the file is the upper left one; angles are counter-clockwise.
    assert int(corners.argmax()) == {90: 2, 180: 3, 270: 1}[rotation]


def test_pixels_that_are_not_square(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 3, aspect=Fraction(4, 3))
    line = timeline(path)
    assert (line.width, line.height) == (85, 48)
    assert next(frames(path, line.shown[:1])).size == (85, 48)


def test_variable_rates(tmp_path: Path) -> None:
    times = [0, 0.1, 0.2, 0.5, 0.6, 1.0, 1.1, 1.2]
    line = timeline(video(tmp_path / "a.mp4", 8, times=times))
    assert [float(at * line.tick) for at in line.shown] == pytest.approx(times)
    assert line.is_uneven


@pytest.mark.parametrize("fps", [Fraction(24000, 1001), Fraction(120), Fraction(16)])
@pytest.mark.parametrize("count", [1, 17])
def test_a_rate_is_that_of_the_file_where_its_times_are_rounded(fps, count, tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"  # in milliseconds
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, width=32, height=32)
        for number in range(count):
            frame = av.VideoFrame(32, 32, "yuv420p")
            frame.pts, frame.time_base = number, 1 / fps
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert timeline(path).fps == pytest.approx(float(fps), rel=1e-9)


def test_what_is_no_video(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("this is no video")
    (tmp_path / "empty.mp4").touch()
    for name, reason in (("text", Reason.NO_VIDEO), ("empty", Reason.EMPTY)):
        with pytest.raises(RefusedError) as refused:
            timeline(tmp_path / f"{name}.mp4")
        assert refused.value.reason is reason and str(tmp_path) not in refused.value.detail


def test_frames_that_a_player_shows_otherwise_are_named(tmp_path: Path) -> None:
    options = {"color_trc": "arib-std-b67", "flags": "+ildct", "x264-params": "interlaced=1"}
    path = numbered_video(tmp_path / "a.mp4", "libx264", options, count=2)
    assert [flaw.split()[0] for flaw in timeline(path).flaws] == ["HDR", "interlaced"]
    out = tmp_path / "out"
    words = ("video", "--video_dir", str(tmp_path), "--output_dir", str(out), "--plan=quick")
    assert main(words) == 0
    (line,) = (out / "plan.jsonl").read_text().splitlines()
    assert {"HDR video", "interlaced video"} <= {n.split(":")[0] for n in json.loads(line)["notes"]}


@pytest.mark.parametrize(("primaries", "named"), [("bt2020", True), ("bt709", False)])
def test_sdr_videos_in_wide_colours_are_named(primaries, named, tmp_path: Path) -> None:
    options = {"color_primaries": primaries}
    path = numbered_video(tmp_path / "a.mp4", "libx264", options, count=2)
    assert [flaw.split(":")[0] for flaw in timeline(path).flaws] == (
        ["SDR video in BT.2020 or P3"] if named else []
    )


@pytest.mark.parametrize(
    ("size", "told", "guessed"),
    [((1280, 32), 2, True), ((32, 720), 2, True), ((1280, 32), 1, False), ((720, 576), 2, False)],
)
def test_large_videos_without_a_colour_matrix_are_named(size, told, guessed, tmp_path) -> None:
    with av.open(str(path := tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=25, width=size[0], height=size[1])
        stream.codec_context.colorspace = told
        container.mux(stream.encode(av.VideoFrame(size[0], size[1], "yuv420p")))
        container.mux(stream.encode())
    assert ["BT.601" in flaw for flaw in timeline(path).flaws] == [True] * guessed


def test_a_second_video_stream_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        both = [container.add_stream("libx264", rate=25, width=w, height=32) for w in (32, 64)]
        for stream in both:
            container.mux(stream.encode(av.VideoFrame(stream.width, 32, "yuv420p")))
            container.mux(stream.encode())
    line = timeline(path)
    assert line.flaws == ("2 video streams in a file: only the first is read",)
    assert line.width == 32


def kept(path: Path, *numbers: int) -> Entry:
    line = timeline(path)
    return Entry(
        key="a",
        source=path.name,
        width=line.width,
        height=line.height,
        keep=tuple(line.shown[number] for number in numbers),
        tick=str(line.tick),
    )


@pytest.fixture
def torchcodec() -> VideoDecoder:
    try:
        VideoDecoder.TORCHCODEC.check()
    except PrepError as error:
        pytest.skip(str(error))
    return VideoDecoder.TORCHCODEC


@pytest.mark.parametrize("ending", CODECS)
def test_both_decoders_give_the_frames_of_the_plan(
    ending: str, torchcodec: VideoDecoder, tmp_path: Path
) -> None:
    path = video(tmp_path / f"a{ending}", 23, rotation=90 if ending == ".mp4" else 0)
    entry = kept(path, 0, 7, 7, 13, 22)
    pairs = zip(torchcodec.frames(path, entry), VideoDecoder.PYAV.frames(path, entry), strict=True)
    for one, two in pairs:
        assert one.size == two.size == (entry.width, entry.height)
        assert np.abs(np.asarray(one, int) - np.asarray(two, int)).mean() <= 2


def test_where_torchcodec_finds_no_frame_pyav_does(
    torchcodec: VideoDecoder, tmp_path: Path
) -> None:
    path = numbered_video(tmp_path / "a.ts", "libx264", {"bf": "3", "g": "12"})
    found = torchcodec.frames(path, kept(path, 5, 20, 20, 39))
    assert [number_of(picture) for picture in found] == [5, 20, 20, 39]


def test_torchcodec_keeps_square_pixels_uneven_times_and_refuses_damage(
    torchcodec: VideoDecoder, tmp_path: Path
) -> None:
    wide = video(tmp_path / "wide.mp4", 3, aspect=Fraction(4, 3))
    assert next(torchcodec.frames(wide, kept(wide, 1))).size == (85, 48)
    uneven = video(tmp_path / "a.mp4", 8, times=[0, 0.1, 0.2, 0.5, 0.6, 1.0, 1.1, 1.2])
    entry = kept(uneven, *range(8))
    grey = [int(np.asarray(p)[-4, -4, 1]) for p in torchcodec.frames(uneven, entry)]
    assert np.abs(np.subtract(grey, [level(i) for i in range(8)])).max() <= 2
    uneven.write_bytes(b"this is no video")
    with pytest.raises(RefusedError):
        list(torchcodec.frames(uneven, entry))


def test_a_decoder_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(PrepError, match=r"torchcodec cannot be used here .* PyAV brings its own"):
        VideoDecoder.TORCHCODEC.check()
