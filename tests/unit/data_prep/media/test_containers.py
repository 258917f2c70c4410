"""Videos as others write them: every frame that is there, found from anywhere; none that is cut."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import av
import pytest

from data_prep.media.frame_selection import FrameRule, Window
from data_prep.media.videos import Timeline, frames, timeline
from data_prep.refusals import Reason, RefusedError
from dit.codecs.frame_pictures import ENDINGS
from tests.media_files import TITLE, number_of, numbered_video

COUNT = 40


class Made(NamedTuple):
    """How a file is made."""

    ending: str
    codec: str
    options: dict[str, str] = {}  # noqa: RUF012
    first: int = 0
    muxer: dict[str, str] = {}  # noqa: RUF012


H264 = {"bf": "3", "g": "12", "preset": "veryfast"}
OPEN = H264 | {"x264-params": "open-gop=1:scenecut=0:keyint=12:min-keyint=12:b-pyramid=normal"}
REFRESH = H264 | {"x264-params": "intra-refresh=1:keyint=12"}
HEVC = {"x265-params": "keyint=12:bframes=3:open-gop=1:log-level=none", "preset": "ultrafast"}
MPEG2 = {"bf": "2", "g": "12", "b": "4000000"}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
FILES = {
    "ts": Made(".ts", "libx264", H264),
    "ts open": Made(".ts", "libx264", OPEN),
    "ts refreshed": Made(".ts", "libx264", REFRESH),
    "ts mpeg2": Made(".ts", "mpeg2video", MPEG2),
    "ts hevc": Made(".ts", "libx265", HEVC),
    "ts one": Made(".ts", "libx264", H264),
    "program stream": Made(".mpg", "mpeg2video", MPEG2),
    "program stream mpeg1": Made(".mpg", "mpeg1video", MPEG2),
    "avi": Made(".avi", "mpeg4", MPEG2),
    "avi h264": Made(".avi", "libx264", H264),
    "avi mjpeg": Made(".avi", "mjpeg", {"b": "4000000"}),
    "mp4 open": Made(".mp4", "libx264", OPEN),
    "mp4 refreshed": Made(".mp4", "libx264", REFRESH),
    "mp4 late": Made(".mp4", "libx264", H264, 125),
    "mp4 fragments": Made(".mp4", "libx264", H264, muxer=FRAGMENTS),
    "mov hevc": Made(".mov", "libx265", HEVC),
    "mov prores": Made(".mov", "prores_ks"),
    "mkv open": Made(".mkv", "libx264", OPEN),
    "mkv late": Made(".mkv", "libx264", H264, 125),
    "mkv live": Made(".mkv", "libx264", H264, muxer={"live": "1"}),
    "mkv ffv1": Made(".mkv", "ffv1", {}, 125),
    "webm vp8": Made(".webm", "libvpx", {"g": "12", "auto-alt-ref": "1", "b": "2000000"}),
    "webm vp9": Made(".webm", "libvpx-vp9", {"g": "12", "b": "2000000", "cpu-used": "8"}),
    "flv": Made(".flv", "libx264", H264),
    "ogg": Made(".ogv", "libvpx", {"g": "12", "b": "2000000"}),
    "wmv": Made(".wmv", "wmv2", {"b": "4000000"}),
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory):
    """The file of a name; each is made once."""
    folder = tmp_path_factory.mktemp("made")

    def make(name: str) -> Path:
        how, path = FILES[name], folder / f"{name.replace(' ', '_')}{FILES[name].ending}"
        if not path.exists():
            count = 1 if name.endswith("one") else COUNT
            numbered_video(
                path, how.codec, how.options, count=count, first=how.first, muxer=how.muxer
            )
        return path

    return make


def shown(file: Path | io.BytesIO, line: Timeline, keep: tuple[int, ...]) -> list[int]:
    """The numbers that the frames at the times `keep` show."""
    numbers = tuple(map(line.shown.index, keep)) if line.by_number else ()
    return [number_of(picture) for picture in frames(file, keep, numbers)]


@pytest.mark.parametrize("name", FILES)
def test_every_window_shows_its_own_frames(name: str, made) -> None:
    line = timeline(path := made(name))
    count = 1 if name.endswith("one") else COUNT
    assert len(line.shown) == count and line.lost == 0 and not line.is_uneven
    assert path.suffix in ENDINGS and not line.flaws
    assert line.fps == pytest.approx(25, rel=2e-3)
    assert shown(path, line, line.shown) == list(range(count))
    for window in (Window.FIRST, Window.MIDDLE, Window.ALL):
        for kept in FrameRule(count=5, window=window).choose(line, seed=""):
            expected = [line.shown.index(at) for at in kept.shown]
            assert shown(path, line, kept.shown) == expected
    for kept in FrameRule(stills=10).choose(line, seed=""):
        assert shown(path, line, kept.shown) == [line.shown.index(kept.shown[0])]


def is_within_a_frame(content: bytes, cut: int) -> bool:
    """Whether the first transport packet of the video behind `cut` continues a frame."""
    for start in range(cut - cut % 188, len(content), 188):
        pid = int.from_bytes(content[start + 1 : start + 3], "big")
        if pid & 0x1FFF == 0x100 and start >= cut:
            return not pid & 0x4000
    return False


# FFmpeg decodes a cut HEVC frame without a word, and transport streams have no table of frames.
@pytest.mark.parametrize("name", [name for name in FILES if name != "ts hevc"])
def test_a_cut_file_is_refused_or_whole(name: str, made) -> None:
    content, refused = made(name).read_bytes(), 0
    whole = len(timeline(made(name)).shown)
    is_transport = FILES[name].ending == ".ts"
    step = max(1, len(content) // 12)
    for cut in range(len(content) - 3, 9, -step):
        if is_transport and cut // step % 2:
            cut -= cut % 188
        file = io.BytesIO(content[:cut])
        try:
            line = timeline(file)
        except RefusedError as error:
            assert error.reason in (Reason.NO_VIDEO, Reason.VIDEO_DAMAGED)
            refused += 1
            continue
        found = shown(file, line, line.shown)
        if is_transport:  # a stream that ends between two frames is a whole stream
            assert cut % 188 == 0 and not is_within_a_frame(content, cut)
            assert found == list(range(len(found))) or len(found) < 4
        else:
            assert found == list(range(whole))
    assert refused >= (6 if is_transport else 10)


@pytest.mark.parametrize("name", ["ts", "ts open"])
def test_a_stream_that_ends_between_frames_misses_none_that_are_shown_before(
    name: str, made
) -> None:
    content, refused = made(name).read_bytes(), 0
    packets = range(0, len(content), 188)
    begins = [at for at in packets if content[at + 1] & 0x5F == 0x41 and content[at + 2] == 0]
    for cut in begins[10:30]:
        try:
            line = timeline(file := io.BytesIO(content[:cut]))
        except RefusedError:
            refused += 1
            continue
        assert shown(file, line, line.shown) == list(range(len(line.shown)))
    assert 0 < refused < 20


def test_an_ogg_file_without_its_last_page_is_cut(made) -> None:
    content = made("ogg").read_bytes()
    last = content.rindex(b"OggS")
    with pytest.raises(RefusedError, match="bytes are missing"):
        timeline(io.BytesIO(content[:last]))


def test_key_frames_that_are_none_are_noticed(tmp_path: Path) -> None:
    whole = numbered_video(tmp_path / "whole.mp4", "mpeg4", {"g": "12", "b": "4000000"})
    path = tmp_path / "all_key.mp4"
    with av.open(str(whole)) as source, av.open(str(path), "w") as marked:
        film = source.streams.video[0]
        copy = marked.add_stream_from_template(film)
        for packet in source.demux(film):
            if packet.size:
                packet.is_keyframe, packet.stream = True, copy
                marked.mux(packet)
    line = timeline(path)
    for number in (6, 17, 38):
        (picture,) = frames(path, line.shown[number : number + 1])
        (expected,) = frames(whole, line.shown[number : number + 1])
        assert picture.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["ts open", "ts mpeg2", "ts hevc"])
def test_a_stream_that_is_joined_late_begins_with_its_first_whole_frame(name: str, made) -> None:
    content = made(name).read_bytes()
    file = io.BytesIO(content[188 * (len(content) // 188 // 3) :])
    line = timeline(file)
    found = shown(file, line, line.shown)
    assert found == list(range(found[0], COUNT)) and 12 <= found[0] <= 24
    assert line.lost > 0


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_cut_that_was_copied_begins_where_its_edit_list_says(codec: str, tmp_path: Path) -> None:
    options = OPEN if codec == "libx264" else HEVC
    whole = numbered_video(tmp_path / "whole.mp4", codec, options)
    with av.open(str(whole)) as source, av.open(str(tmp_path / "cut.mp4"), "w") as cut:
        film = source.streams.video[0]
        copy = cut.add_stream_from_template(film)
        packets = [packet for packet in source.demux(film) if packet.size]
        second = [n for n, packet in enumerate(packets) if packet.is_keyframe][1]
        frame = packets[second].duration
        begin = packets[second].pts + 3 * frame  # three frames behind a key frame
        for packet in packets[second:]:
            packet.pts, packet.dts, packet.stream = packet.pts - begin, packet.dts - begin, copy
            cut.mux(packet)
    line = timeline(tmp_path / "cut.mp4")
    found = shown(tmp_path / "cut.mp4", line, line.shown)
    assert found == list(range(found[0], COUNT)) and found[0] in (12, 15)
    for at in line.shown:
        assert shown(tmp_path / "cut.mp4", line, (at,)) == [found[line.shown.index(at)]]


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
def test_covers_and_titles_do_not_matter(ending: str, tmp_path: Path) -> None:
    path = numbered_video(tmp_path / f"a{ending}", "libx264", H264, cover=ending == ".mp4")
    content = path.read_bytes()
    assert TITLE.encode() in content
    path.write_bytes(content.replace(TITLE.encode(), b"caf\xe9"))  # Latin-1
    line = timeline(path)
    assert shown(path, line, line.shown) == list(range(COUNT))


def test_a_damaged_frame_is_refused_wherever_reading_begins(made) -> None:
    content = bytearray(made("mkv open").read_bytes())
    line = timeline(made("mkv open"))
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(400)
    with pytest.raises(RefusedError):
        shown(io.BytesIO(content), line, line.shown)
    with pytest.raises(RefusedError):
        shown(io.BytesIO(content), line, line.shown[18:24])
    assert shown(io.BytesIO(content), line, line.shown[:4]) == [0, 1, 2, 3]
