"""Tones of moving digits: the pitch is that of the digit, and the loudness that of the direction.

A tone is as long as its clip. It rises when the digit moves right or down, and falls when it moves
left or up, so that sound alone tells the digit, but only half of the direction.
"""

# S samples of a waveform

from __future__ import annotations

import numpy as np

from examples.digits.judges import DIRECTIONS, Motion

RATE = 4000  # samples a second
FPS = 8.0  # of the clips, as in data_prep/sources/digits.py, which judges must not import
FRAMES = 9
SAMPLES = round(FRAMES / FPS * RATE)
PITCHES = tuple(200.0 + 160.0 * digit for digit in range(10))
"""Hertz of the tone of each digit: whole periods in a latent frame of 100 samples."""
RISING = ("right", "down")  # directions
QUIET, LOUD = 0.1, 0.9
"""Amplitudes of a tone at its ends."""


def tone(digit: int, direction: str) -> np.ndarray:
    """The waveform of a clip in which `digit` moves in `direction`: float32 [S] in [-1, 1]."""
    time_S = np.arange(SAMPLES) / RATE
    ends = (QUIET, LOUD) if direction in RISING else (LOUD, QUIET)
    amplitude_S = np.linspace(*ends, SAMPLES)
    return (amplitude_S * np.sin(2 * np.pi * PITCHES[digit] * time_S)).astype(np.float32)


def is_rising(motion: Motion) -> bool:
    """Whether the tone of a clip becomes louder."""
    return DIRECTIONS[motion.direction] in RISING


def pitch_of(wave_S: np.ndarray, rate: int = RATE) -> float:
    """Frequency of the largest bin of the spectrum of the whole waveform, in hertz."""
    bins = np.abs(np.fft.rfft(wave_S))
    return float(bins.argmax() * rate / len(wave_S))


def digit_of(wave_S: np.ndarray, rate: int = RATE) -> int | None:
    """The digit whose pitch a waveform has; None if no pitch is near enough.

    It must be within a quarter of the step between two pitches.
    """
    heard, step = pitch_of(wave_S, rate), PITCHES[1] - PITCHES[0]
    nearest = int(np.argmin(np.abs(np.array(PITCHES) - heard)))
    return nearest if abs(PITCHES[nearest] - heard) <= step / 4 else None


def rises(wave_S: np.ndarray) -> bool:
    """Whether the second half of a waveform is louder than the first."""
    first, second = np.array_split(np.square(wave_S.astype(np.float64)), 2)
    return bool(second.mean() > first.mean())
