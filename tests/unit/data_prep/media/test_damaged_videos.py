"""Damaged videos: frames as planned, or a refusal of that file; never anything else."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.media.frame_selection import FrameRule, Window
from data_prep.media.truncation import missing_bytes
from data_prep.media.videos import frames, timeline
from data_prep.refusals import Reason, RefusedError
from tests.hostile import damaged
from tests.media_files import numbered_video

B_FRAMES = {"bf": "2", "g": "4", "preset": "ultrafast"}
SMALL = {
    ".mp4": ("libx264", B_FRAMES),
    ".mkv": ("mpeg4", {"g": "4"}),
    ".webm": ("libvpx-vp9", {"g": "4", "cpu-used": "8"}),
    ".avi": ("mpeg4", {"g": "4", "bf": "2"}),
    ".ts": ("libx264", B_FRAMES),
    ".mpg": ("mpeg2video", {"g": "4", "bf": "2"}),
    ".flv": ("flv", {"g": "4"}),
    ".ogv": ("libvpx", {"g": "4"}),
    ".wmv": ("wmv2", {"g": "4"}),
}
RULES = (
    FrameRule(count=3, window=Window.ALL),
    FrameRule(stills=2),
    FrameRule(fps=24, count=5, window=Window.MIDDLE),
)


@cache
def small(ending: str) -> bytes:
    """A whole file of six frames, a few kB."""
    codec, options = SMALL[ending]
    with tempfile.TemporaryDirectory() as folder:
        path = numbered_video(Path(folder) / f"a{ending}", codec, options, count=6)
        return path.read_bytes()


@st.composite
def damaged_videos(draw: st.DrawFn) -> bytes:
    return draw(damaged(small(draw(st.sampled_from(sorted(SMALL))))))


@given(content=damaged_videos(), rule=st.sampled_from(RULES))
def test_hostile_videos(content: bytes, rule: FrameRule) -> None:
    file = io.BytesIO(content)
    try:
        line = timeline(file)
        assert list(line.shown) == sorted(set(line.shown)) and line.duration > 0
        for kept in rule.choose(line, seed=""):
            numbers = tuple(map(line.shown.index, kept.shown)) if line.by_number else ()
            found = list(frames(file, kept.shown, numbers))
            assert len(found) == len(kept.shown)
    except RefusedError as refused:
        assert refused.reason in (Reason.NO_VIDEO, Reason.VIDEO_DAMAGED)


heads = st.sampled_from(
    [b"", b"RIFF", b"OggS", b"FLV", b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftyp", b"\x47" * 999]
)


@given(head=heads, rest=st.binary(max_size=200))
def test_hostile_boxes(head: bytes, rest: bytes) -> None:
    missing = missing_bytes(file := io.BytesIO(head + rest))
    assert missing is None or missing >= 0
    assert file.tell() == 0


@pytest.mark.parametrize("ending", SMALL)
def test_the_whole_file_is_whole(ending: str) -> None:
    assert len(timeline(io.BytesIO(small(ending))).shown) == 6
    assert len(small(ending)) < 40_000
