"""Clips with sound as others write them: what is heard is in step with the frames that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from data_prep.media.frame_selection import FrameRule, KeptFrames, Window
from data_prep.media.videos import Timeline, frames, timeline
from dit.codecs.sound.tracks import SoundSpan, SoundTrack
from tests.sound_files import Sound, SoundClip, heard_at, make_clip

RATE = 16_000
STEP = 1e-3  # seconds by which sound and picture may differ
EDITED = {"use_editlist": "1", "avoid_negative_ts": "disabled"}
# Distances between frames; one is shown at 1.2 s, where a frame of 20 and of 25 a second is.
UNEVEN = (0.02, 0.06, 0.1, 0.04, 0.08, 0.02, 0.06, 0.02, 0.1, 0.1) * 6
TIMES = tuple(round(sum(UNEVEN[:number]), 3) for number in range(len(UNEVEN)))
LONG = {"end": 24.0, "white": 12.0}


class OddClip(NamedTuple):
    """How a clip is made and kept, and what of its sound is missing."""

    clip: SoundClip
    rule: FrameRule = FrameRule()
    number: int | None = None
    channels: int = 1
    late: float = 0.0
    short: float = 0.0
    gaps: float = 0.0


def opus(**given: object) -> Sound:
    return Sound(**{"rate": 48_000, **given})  # type: ignore[arg-type]


CLIPS = {
    "mp4 that begins in the middle of a file by its edit list": OddClip(
        SoundClip(offset=-0.52, muxer=EDITED)
    ),
    "mp4 whose sound begins late": OddClip(
        SoundClip(sounds=(Sound(begin=0.7),)), late=0.68, channels=2
    ),
    "mkv with two tracks, the second its default": OddClip(
        SoundClip(ending=".mkv", sounds=(opus(shift=0.5), opus(is_default=True)))
    ),
    "ts with the offset of its multiplexer, and reordered frames": OddClip(
        SoundClip(ending=".ts", options={"bf": "3", "preset": "veryfast"})
    ),
    "mkv of a variable frame rate at an even one": OddClip(
        SoundClip(ending=".mkv", times=TIMES, sounds=(opus(end=TIMES[-1]),)),
        FrameRule(fps=20),
    ),
    "mp4 with a hole": OddClip(SoundClip(sounds=(Sound(hole=(0.3, 0.8)),)), gaps=0.51),
    "mp4": OddClip(SoundClip()),
    "mp4 whose picture begins late": OddClip(SoundClip(begin=0.52)),
    "mp4 that begins at ten seconds": OddClip(SoundClip(offset=10.0)),
    "mp4 of fragments": OddClip(SoundClip(muxer={"movflags": "frag_keyframe+delay_moov"})),
    "mp4 of a variable frame rate at an even one": OddClip(
        SoundClip(times=TIMES, sounds=(Sound(end=TIMES[-1]),)), FrameRule(fps=25)
    ),
    "mp4 with two tracks, the second asked for": OddClip(
        SoundClip(sounds=(Sound(shift=0.5), Sound())), number=1
    ),
    "mp4 with a shorter track": OddClip(SoundClip(sounds=(Sound(end=2.0),)), short=0.98),
    "mp4 with a longer track": OddClip(SoundClip(sounds=(Sound(end=4.0),))),
    "mp4 of 32,000 Hz, mono to stereo": OddClip(
        SoundClip(sounds=(Sound(rate=32_000, layout="mono"),)), channels=2
    ),
    "mp4 of eight channels": OddClip(
        SoundClip(sounds=(Sound(rate=48_000, layout="7.1", level=0.2),)), channels=2
    ),
    "mkv of six channels": OddClip(
        SoundClip(ending=".mkv", sounds=(opus(codec="ac3", layout="5.1", level=0.2),))
    ),
    "mkv whose sound begins before its picture": OddClip(
        SoundClip(ending=".mkv", sounds=(opus(begin=-0.4),))
    ),
    "mkv with vorbis": OddClip(
        SoundClip(ending=".mkv", sounds=(Sound(codec="vorbis", options={"strict": "-2"}),))
    ),
    "mkv with a hole": OddClip(
        SoundClip(ending=".mkv", sounds=(opus(hole=(0.3, 0.8)),)), gaps=0.49
    ),
    "webm": OddClip(SoundClip(ending=".webm", sounds=(opus(),))),
    "avi of 11,025 Hz": OddClip(
        SoundClip(ending=".avi", sounds=(Sound(rate=11_025, layout="mono"),))
    ),
    "mov of 96,000 Hz": OddClip(SoundClip(ending=".mov", sounds=(Sound(rate=96_000),))),
    "mov without loss": OddClip(
        SoundClip(ending=".mov", sounds=(Sound(codec="alac", rate=22_050, layout="mono"),))
    ),
    "program stream": OddClip(SoundClip(ending=".mpg", sounds=(opus(),))),
    "flv with mp3": OddClip(SoundClip(ending=".flv", sounds=(Sound(codec="libmp3lame"),))),
    "wmv": OddClip(
        SoundClip(ending=".wmv", sounds=(Sound(options={"b": "128000"}),)), late=0.046
    ),
    "ogv": OddClip(SoundClip(ending=".ogv", sounds=(opus(layout="mono"),))),
    "middle of a long mp4": OddClip(
        SoundClip(sounds=(Sound(end=24.0),), **LONG), FrameRule(count=76, window=Window.MIDDLE)
    ),
    "middle of a long mkv": OddClip(
        SoundClip(ending=".mkv", sounds=(opus(end=24.0, codec="libmp3lame"),), **LONG),
        FrameRule(count=76, window=Window.MIDDLE),
    ),
    "middle of a long ts at another frame rate": OddClip(
        SoundClip(ending=".ts", sounds=(Sound(end=24.0),), **LONG),
        FrameRule(count=37, fps=12, window=Window.MIDDLE),
    ),
}  # fmt: skip
QUICK = 6
CASES = [
    pytest.param(one, id=name, marks=[pytest.mark.slow] * (number >= QUICK))
    for number, (name, one) in enumerate(CLIPS.items())
]


def white_frame(file: Path, line: Timeline, kept: KeptFrames) -> int:
    """The number of the first frame of a sample that is white."""
    numbers = line.numbers_of(kept.shown) if line.by_number else ()
    pictures = frames(file, kept.shown, numbers)
    return next(n for n, one in enumerate(pictures) if np.asarray(one.convert("L")).mean() > 125)


def span_of(file: Path, odd: OddClip, kept: KeptFrames) -> SoundSpan:
    track = SoundTrack.of(file, rate=RATE, channels=odd.channels, number=odd.number)
    assert kept.fps is not None
    return track.read_span(kept.begin, len(kept.shown) / kept.fps)


@pytest.mark.parametrize("odd", CASES)
def test_sound_is_in_step_with_the_frames(odd: OddClip, tmp_path: Path) -> None:
    file = make_clip(tmp_path / f"clip{odd.clip.ending}", odd.clip)
    line = timeline(file)
    (kept,) = odd.rule.choose(line, seed="clip")
    span = span_of(file, odd, kept)
    assert kept.fps is not None
    assert span.samples_CS.shape == (odd.channels, round(len(kept.shown) / kept.fps * RATE))
    white = white_frame(file, line, kept) / kept.fps
    for samples_S in span.samples_CS:
        assert abs(heard_at(samples_S, RATE) - white) <= STEP
    found = {"late": span.late, "short": span.short, "gaps": span.gaps}
    wanted = {"late": odd.late, "short": odd.short, "gaps": odd.gaps}
    assert found == pytest.approx(wanted, abs=0.025)
