"""Videos whose pictures change size, pixel aspect, turn or colours in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from PIL import Image

from data_prep.media.clips import Entry
from data_prep.media.video_looks import KeyFrames
from data_prep.media.videos import VideoDecoder, frames, timeline
from data_prep.refusals import PrepError, Reason, RefusedError
from tests.unit.data_prep.sources.test_references import TEXT, pack, refused

FPS = 16
WIDE, HIGH = (96, 48), (48, 96)
H264 = {"qp": "8", "bf": "0"}


class Part(NamedTuple):
    """Frames of one look, each of one colour."""

    count: int
    size: tuple[int, int] = WIDE
    aspect: Fraction | None = None
    options: dict[str, str] = H264
    pix_fmt: str = "yuv420p"
    turn: int = 0  # degrees
    colours: dict[str, Any] = {}  # noqa: RUF012


def shade(number: int) -> tuple[int, int, int]:
    return 200 - 8 * number, 30 + 8 * number, 90


def joined(path: Path, parts: Sequence[Part], codec: str = "libx264") -> Path:
    """A file of several parts, each encoded alone, as of streams that were joined."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=FPS)
        stream.width, stream.height = parts[0].size
        stream.pix_fmt, first = parts[0].pix_fmt, 0
        for part in parts:
            packets = encoded(part, codec, first)
            if part.turn:
                how = f"h264_metadata=display_orientation=insert:rotate={part.turn}"
                turning = av.bitstream.BitStreamFilterContext(how, stream)
                packets = [one for packet in packets for one in turning.filter(packet)]
            for packet in packets:
                packet.stream = stream
                file.mux(packet)
            first += part.count
    return path


def encoded(part: Part, codec: str, first: int) -> list[av.Packet]:
    context: Any = av.CodecContext.create(codec, "w")
    context.width, context.height = part.size
    context.pix_fmt, context.time_base = part.pix_fmt, Fraction(1, FPS)
    context.framerate, context.options = Fraction(FPS), dict(part.options)
    if part.aspect is not None:
        context.sample_aspect_ratio = part.aspect
    for name, value in part.colours.items():
        setattr(context, name, value)
    made = list[av.Packet]()
    for number in range(first, first + part.count):
        picture = Image.new("RGB", part.size, shade(number))
        frame = av.VideoFrame.from_image(picture)
        told = {f"dst_{name}": value for name, value in part.colours.items()}
        frame = frame.reformat(format=part.pix_fmt, **told)
        frame.pts = number
        made += context.encode(frame)
    made += context.encode(None)
    for packet in made:
        packet.time_base, packet.duration = Fraction(1, FPS), 1
    return made


def centres(pictures: Sequence[Image.Image]) -> np.ndarray:
    return np.array([p.convert("RGB").getpixel((p.width // 2, p.height // 2)) for p in pictures])


CODECS = {  # each way in which a file tells size and times
    "a.ts": ("libx264", H264, "yuv420p"),
    "reordered.ts": ("libx264", {"qp": "8", "bf": "3"}, "yuv420p"),
    "a.mkv": ("libx264", H264, "yuv420p"),
    "reordered.mp4": ("libx264", {"qp": "8", "bf": "3"}, "yuv420p"),
    "a.flv": ("libx264", H264, "yuv420p"),
    "a.webm": ("libvpx-vp9", {"cpu-used": "8", "crf": "10"}, "yuv420p"),
    "b.webm": ("libvpx", {"crf": "4", "b": "4000000"}, "yuv420p"),
    "a.avi": ("mjpeg", {"qscale": "2"}, "yuvj420p"),
    "b.avi": ("mpeg4", {"qscale": "2"}, "yuv420p"),
    "png.mov": ("png", {}, "rgb24"),
    "prores.mov": ("prores_ks", {}, "yuv422p10le"),
}


@pytest.mark.parametrize("name", CODECS)
def test_a_clip_ends_where_its_size_changes(name: str, tmp_path: Path) -> None:
    codec, options, pix_fmt = CODECS[name]
    like = {"options": options, "pix_fmt": pix_fmt}
    parts = [Part(9, WIDE, **like), Part(7, HIGH, **like), Part(3, WIDE, **like)]
    line = timeline(path := joined(tmp_path / name, parts, codec))
    assert (line.width, line.height, len(line.shown), line.left) == (*WIDE, 9, 10)
    assert line.duration == pytest.approx(9 / FPS) and line.fps == pytest.approx(FPS)
    assert not line.is_uneven
    assert line.change == "from 96 x 48 to 48 x 96 at 0.562 s"
    assert "the clip ends there" in line.flaws[-1]
    found = list(frames(path, line.shown, line.numbers_of(line.shown) if line.by_number else ()))
    assert {picture.size for picture in found} == {WIDE}
    assert np.abs(centres(found) - [shade(number) for number in range(9)]).max() <= 12


@pytest.mark.parametrize("name", ["a.ts", "reordered.ts", "a.mkv", "reordered.mp4"])
@pytest.mark.parametrize("aspects", [(None, Fraction(2)), (Fraction(2), Fraction(4, 3))])
def test_a_clip_ends_where_its_pixel_aspect_changes(name, aspects, tmp_path: Path) -> None:
    """Decoders that reorder frames tell the aspect of a later one."""
    parts = [Part(7, options=CODECS[name][1], aspect=aspect) for aspect in aspects]
    parts.append(Part(2, HIGH, options=CODECS[name][1]))  # what comes first counts
    line = timeline(path := joined(tmp_path / name, parts))
    width = 96 * int(aspects[0] or 1)
    assert (line.width, line.height, len(line.shown)) == (width, 48, 7)
    assert line.change.endswith(
        f"(pixels of {aspects[1].numerator}:{aspects[1].denominator}) at 0.438 s"
    )
    assert {picture.size for picture in frames(path, line.shown)} == {(width, 48)}


@pytest.mark.parametrize("name", ["a.ts", "a.mkv", "a.mp4"])
def test_a_clip_ends_where_its_turn_changes(name: str, tmp_path: Path) -> None:
    """H.264 tells it beside a frame; where later ones tell nothing, it stays."""
    line = timeline(path := joined(tmp_path / name, [Part(4), Part(5, turn=90), Part(3)]))
    assert (line.width, line.height, len(line.shown), line.left) == (*WIDE, 4, 8)
    assert line.change == "from 96 x 48 to 96 x 48 (rotate 90) at 0.250 s"
    assert len(list(frames(path, line.shown))) == 4
    same = timeline(joined(tmp_path / f"same_{name}", [Part(4, turn=90), Part(5)]))
    assert (same.width, same.height, len(same.shown), same.change) == (*HIGH, 9, "")


COLOURS: dict[str, tuple[Part, Part]] = {
    "matrix": (Part(3, colours={"colorspace": 5}), Part(3, colours={"colorspace": 1})),
    "range": tuple(Part(3, colours={"colorspace": 5, "color_range": k}) for k in (1, 2)),
    "pixel format": (Part(3), Part(3, pix_fmt="yuv444p")),
    "bits": (Part(3), Part(3, pix_fmt="yuv420p10le")),
}


@pytest.mark.parametrize("what", COLOURS)
def test_colours_are_converted_frame_by_frame(what: str, tmp_path: Path) -> None:
    """Where matrix, range or pixel format change, the pictures do not."""
    line = timeline(path := joined(tmp_path / "a.ts", COLOURS[what]))
    assert len(line.shown) == 6 and not line.change
    found = centres(list(frames(path, line.shown)))
    assert np.abs(found - [shade(number) for number in range(6)]).max() <= 3


LOST = [({"color_range": 2}, "full range"), ({"colorspace": 1}, "colour matrix")]


@pytest.mark.parametrize(("told", "words"), LOST)
@pytest.mark.parametrize("name", ["a.ts", "a.mp4"])
def test_a_clip_ends_where_colours_are_no_longer_told(told, words, name, tmp_path: Path) -> None:
    """FFmpeg's decoder of H.264 keeps those of the part before; from none to told it does not."""
    parts = [Part(3, colours=told), Part(3)]
    line = timeline(path := joined(tmp_path / name, parts))
    assert line.change == f"from a stated {words} to none at 0.188 s" and len(line.shown) == 3
    line = timeline(path := joined(tmp_path / name, parts[::-1]))
    assert not line.change
    found = centres(list(frames(path, line.shown)))
    assert np.abs(found - [shade(number) for number in range(6)]).max() <= 3


@pytest.mark.parametrize(
    ("parts", "hidden", "count"),
    [([Part(6), Part(5, HIGH)], 2, 4), ([Part(3, HIGH), Part(4), Part(5, HIGH)], 3, 4)],
)
def test_an_edit_list_that_hides_the_first_key_frame(parts, hidden, count, tmp_path: Path) -> None:
    """What is shown first has the size of its group of pictures; hidden groups do not count."""
    whole = joined(tmp_path / "whole.mp4", parts)
    with av.open(str(whole)) as source, av.open(str(tmp_path / "a.mp4"), "w") as copy:
        film = source.streams.video[0]
        out = copy.add_stream_from_template(film)
        offset = round(hidden / FPS / film.time_base)
        for packet in source.demux(film):
            if packet.size:
                packet.stream, packet.pts, packet.dts = (
                    out,
                    packet.pts - offset,
                    packet.dts - offset,
                )
                copy.mux(packet)
    line = timeline(tmp_path / "a.mp4")
    assert line.change == "from 96 x 48 to 48 x 96 at 0.250 s" and len(line.shown) == count


class Hidden:
    """A packet that an edit list hides."""

    is_discard = True

    def __init__(self, packet: av.Packet):
        self.content, self.pts, self.is_keyframe = bytes(packet), packet.pts, packet.is_keyframe

    def __bytes__(self) -> bytes:
        return self.content


def test_key_frames_before_the_first_that_is_shown_do_not_count(tmp_path: Path) -> None:
    path = joined(tmp_path / "a.ts", [Part(3, HIGH), Part(4), Part(5, HIGH)])
    with av.open(str(path)) as file:
        keys = KeyFrames(video := file.streams.video[0])
        for number, packet in enumerate(file.demux(video)):
            if packet.size:
                keys.see(Hidden(packet) if number < 3 else packet)
    assert keys.change is not None and keys.change.words == "from 96 x 48 to 48 x 96"


def test_plan_and_packing_count_such_clips(tmp_path: Path, capsys) -> None:
    joined(tmp_path / "films/a.ts", [Part(5), Part(4, HIGH)])
    joined(tmp_path / "films/b.mp4", [Part(9)])
    options = ("--video_dir", tmp_path / "films", *TEXT, "--pixel_block", 8)
    said = "1 x its size changes (or pixel aspect, rotation, stated colours): the clip ends there"
    for more in (("--plan",), ("--plan=quick",), ("--plan", "--mode", "frames", "--num_frames", 1)):
        assert pack(tmp_path / "plan", *options, *more, kind="video") == 0
        assert said in capsys.readouterr().out
    planned = map(Entry.from_line, (tmp_path / "plan/plan.jsonl").read_text().splitlines())
    assert {(one.source, one.size) for one in planned} == {("a.ts", WIDE), ("b.mp4", WIDE)}
    assert pack(tmp_path / "out", *options, kind="video") == 0
    assert f"packed: {said}" in capsys.readouterr().out
    assert said[4:] in (tmp_path / "out/dataset_card.json").read_text()
    short = ("--target_frames", 9, "--drop_short", "--max_bad_fraction", 0.9)
    assert pack(tmp_path / "short", *options, *short, kind="video") == 0
    why = "it has 5 frames until it changes from 96 x 48 to 48 x 96 at 0.312 s, fewer than"
    reason, detail = refused(tmp_path / "short")["a.ts"]
    assert reason == "video has too few frames" and detail.startswith(
        f"{why} --target_frames 9; leave --drop_short"
    )


@pytest.mark.parametrize("option", ["--mask_dir", "--control_dir", "--rejected_dir"])
def test_what_belongs_to_a_clip_may_not_change(option: str, tmp_path: Path) -> None:
    joined(tmp_path / "films/a.mp4", [Part(9)])
    joined(tmp_path / "films/b.mp4", [Part(9)])
    joined(tmp_path / "beside/a.mkv", [Part(5), Part(4, HIGH)])
    joined(tmp_path / "beside/b.mkv", [Part(9)])
    options = ("--video_dir", tmp_path / "films", option, tmp_path / "beside", *TEXT)
    assert pack(tmp_path / "out", *options, "--max_bad_fraction", 0.9, kind="video") == 0
    assert refused(tmp_path / "out").keys() == {"a.mp4"}
    (why,) = refused(tmp_path / "out").values()
    assert "size changes (or pixel aspect, rotation, stated colours) within a video" in why[1]
    assert "from 96 x 48 to 48 x 96 at 0.312 s; cut the file there" in why[1]


@pytest.mark.parametrize("option", ["--mask_dir", "--control_dir"])
def test_what_belongs_to_a_changing_clip_may_be_as_long(option: str, tmp_path: Path) -> None:
    joined(tmp_path / "films/a.mkv", [Part(5), Part(4, HIGH)])
    joined(tmp_path / "beside/a.mkv", [Part(9)])
    options = ("--video_dir", tmp_path / "films", option, tmp_path / "beside", *TEXT)
    assert pack(tmp_path / "out", *options, kind="video") == 0


@pytest.fixture(params=list(VideoDecoder))
def decoder(request: pytest.FixtureRequest) -> VideoDecoder:
    try:
        request.param.check()
    except PrepError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize("ending", [".mp4", ".mkv", ".ts"])
def test_both_decoders_end_there(ending: str, decoder: VideoDecoder, tmp_path: Path) -> None:
    path = joined(tmp_path / f"a{ending}", [Part(9), Part(6, HIGH)])
    line = timeline(path)
    about = {"key": "a", "source": path.name, "width": 96, "height": 48, "tick": str(line.tick)}
    found = list(decoder.frames(path, Entry(keep=line.shown, **about)))
    assert np.abs(centres(found) - [shade(number) for number in range(9)]).max() <= 8


def test_a_change_that_no_key_frame_tells_is_refused_when_it_is_read(
    decoder: VideoDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VP9 and AV1 may change their size between key frames."""
    monkeypatch.setattr("data_prep.media.video_looks.KeyFrames.see", lambda self, packet: None)
    line = timeline(path := joined(tmp_path / "a.mkv", [Part(9), Part(6, HIGH)]))
    about = {"key": "a", "source": path.name, "width": 96, "height": 48, "tick": str(line.tick)}
    with pytest.raises(RefusedError) as error:
        list(decoder.frames(path, Entry(keep=line.shown, **about)))
    assert error.value.reason is Reason.CHANGING
    assert "from 96 x 48 to 48 x 96" in error.value.detail and "0.56" in error.value.detail
