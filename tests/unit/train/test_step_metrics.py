"""Parts of a step: no second counts twice."""

from __future__ import annotations

from dit.train import timers
from dit.train.timers import BACKWARD, COMMUNICATION, FORWARD, TIMED_PARTS, elapsed, timed


def test_inner_parts_are_taken_out_of_outer_ones(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 6.0, 7.0, 10.0])
    monkeypatch.setattr(timers, "_now", lambda: next(now))
    elapsed()
    with timed(BACKWARD):
        with timed(FORWARD):
            pass
        timed(COMMUNICATION)(lambda: None)()
    found = elapsed()
    assert found == dict.fromkeys(TIMED_PARTS, 0.0) | {
        BACKWARD: 6.0,
        FORWARD: 3.0,
        COMMUNICATION: 1.0,
    }
    assert elapsed() == dict.fromkeys(TIMED_PARTS, 0.0)
