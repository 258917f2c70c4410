"""Which frames are kept: the codec's rule always holds, and time passes as it did."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.media.frame_selection import FrameRule, Window
from data_prep.media.videos import Timeline
from data_prep.refusals import PrepError, Reason, RefusedError


def line(count: int, fps: float = 10) -> Timeline:
    """A clip with one tick a millisecond."""
    shown = tuple(round(1000 * k / fps) for k in range(count))
    duration = count / fps
    return Timeline(width=8, height=8, shown=shown, tick=Fraction(1, 1000), duration=duration)


def kept(rule: FrameRule, clip: Timeline) -> list[list[int]]:
    """Numbers of the frames kept."""
    return [[clip.shown.index(at) for at in k.shown] for k in rule.choose(clip, seed="x")]


@settings(deadline=None)
@given(
    count=st.integers(1, 200),
    stride=st.sampled_from([1, 4, 8]),
    most=st.integers(0, 20) | st.none(),
    window=st.sampled_from(Window),
    fps=st.none() | st.floats(1, 60),
)
def test_every_sample_has_frames_that_the_codec_takes(count, stride, most, window, fps) -> None:
    target = None if most is None else 1 + most * stride
    rule = FrameRule(stride=stride, count=target, window=window, fps=fps)
    clip = line(count)
    for found in rule.choose(clip, seed="clip"):
        assert (len(found.shown) - 1) % stride == 0
        assert target is None or len(found.shown) <= target
        assert list(found.shown) == sorted(found.shown) and set(found.shown) <= set(clip.shown)


def test_windows() -> None:
    clip = line(24)
    assert kept(FrameRule(count=9, stride=4), clip) == [list(range(9))]
    assert kept(FrameRule(count=9, stride=4, window=Window.MIDDLE), clip) == [list(range(7, 16))]
    whole = kept(FrameRule(count=9, stride=4, window=Window.ALL), clip)
    assert whole == [list(range(9)), list(range(9, 18))]
    (drawn,) = kept(FrameRule(count=9, stride=4, window=Window.RANDOM), clip)
    assert drawn == list(range(drawn[0], drawn[0] + 9))
    assert kept(FrameRule(stride=8), clip) == [list(range(17))]  # the whole clip, rounded down


def test_sampling_by_time() -> None:
    clip = line(30, fps=30)
    assert kept(FrameRule(fps=10), clip) == [list(range(0, 30, 3))]
    (slow,) = kept(FrameRule(fps=16), clip)
    assert slow == [int(k * 30 / 16 + 1e-6) for k in range(16)]
    (fast,) = kept(FrameRule(fps=60), clip)
    assert fast == [k // 2 for k in range(60)]
    assert FrameRule(fps=16).choose(clip, seed="")[0].fps == 16


@pytest.mark.parametrize("rate", [8, 16, 24])
def test_a_coarse_clock_chooses_the_frames_of_a_fine_one(rate: int) -> None:
    """AVI counts frames: those times are exact, and half of one would be half a frame."""
    clip = line(50, fps=12.5)
    counted = replace(clip, shown=tuple(range(50)), tick=Fraction(2, 25))
    assert kept(FrameRule(fps=rate), counted) == kept(FrameRule(fps=rate), clip)


def test_a_variable_rate_keeps_its_frames_or_becomes_an_even_clock() -> None:
    shown = (0, 100, 200, 800, 900)  # the third frame stays for 0.6 s
    clip = Timeline(width=8, height=8, shown=shown, tick=Fraction(1, 1000), duration=1.0)
    assert clip.is_uneven
    (found,) = FrameRule(fps=10).choose(clip, seed="")
    assert found.shown == (0, 100, 200, 200, 200, 200, 200, 200, 800, 900)
    assert found.fps == 10 and found.is_resampled
    (found,) = FrameRule().choose(clip, seed="")
    assert found.shown == shown and found.fps == 5 and not found.is_resampled
    first, last = FrameRule(count=2, window=Window.ALL).choose(clip, seed="")
    assert (first.shown, first.fps) == ((0, 100), 10)  # until the next frame, at 200
    assert (last.shown, last.fps) == ((200, 800), pytest.approx(2 / 0.7))
    (last,) = FrameRule(count=4, window=Window.MIDDLE).choose(
        replace(clip, shown=shown[1:]), seed=""
    )
    assert last.fps == pytest.approx(4)  # to the end of the clip


def test_too_short() -> None:
    assert kept(FrameRule(stride=4, count=17), line(10)) == [list(range(9))]
    with pytest.raises(RefusedError, match="10 frames, fewer than --target_frames 17") as refused:
        FrameRule(stride=4, count=17, drop_short=True).choose(line(10), seed="")
    assert refused.value.reason is Reason.TOO_SHORT


def test_frame_buckets() -> None:
    rule = FrameRule(stride=4, buckets=(9, 17, 33))
    assert [len(rule.choose(line(n), seed="")[0].shown) for n in (9, 16, 17, 100)] == [9, 9, 17, 33]
    with pytest.raises(RefusedError, match="8 frames, fewer than 9"):
        rule.choose(line(8), seed="")


def test_single_frames_are_evenly_spaced() -> None:
    assert kept(FrameRule(stills=3), line(9)) == [[1], [4], [7]]
    assert kept(FrameRule(stills=40), line(2)) == [[0], [1]]
    assert FrameRule(stills=3).choose(line(9), seed="")[0].fps is None


def test_numbers_that_the_codec_does_not_take() -> None:
    with pytest.raises(PrepError, match=r"10 frames.*4n \+ 1; give 9 or 13"):
        FrameRule(stride=4, count=10)
    with pytest.raises(PrepError, match=r"120 frames.*give 113 or 121"):
        FrameRule(stride=8, buckets=(9, 120))


@pytest.mark.parametrize("fps", [0, -1, 1e-5, 1e9, math.nan, math.inf])
def test_rates_out_of_reason(fps: float) -> None:
    with pytest.raises(PrepError, match=r"--train_fps \S+ must lie in 0\.01 to 1000 frames"):
        FrameRule(fps=fps)


def test_a_clip_of_a_day_is_not_repeated_for_ever() -> None:
    clip = Timeline(width=8, height=8, shown=(0, 1), tick=Fraction(1), duration=1e12)
    with pytest.raises(RefusedError, match="1000000000000 s at --train_fps 24"):
        FrameRule(fps=24).choose(clip, seed="")
