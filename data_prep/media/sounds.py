"""Plans the sound of each sample of a video, then decodes it to a waveform.

A sample whose sound cannot be used is packed without sound, unless `MissingAudio` says otherwise.
The fault is counted as a note: in the plan, or on the decoded clip if only decoding shows it.
"""

# C channels of sound, S samples

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from data_prep.media.frame_selection import KeptFrames
from data_prep.refusals import Reason, RefusedError

if TYPE_CHECKING:  # needs torch, without which --help answers
    from torch import Tensor

    from data_prep.media.clips import PlannedSound
    from dit.codecs.sound.tracks import SoundSpan

WITH, SILENCE = "with sound", "with silence in the place of sound (--missing_audio silence)"
_WITHOUT = "without sound"
_SILENT = 1e-3  # fraction of full scale (-60 dB) that no sample of a silent clip exceeds
_NOTICED = 0.1  # seconds; less missing sound gets no note


class MissingAudio(StrEnum):
    """What happens to a clip whose sound is missing or cannot be used."""

    NONE = "none"  # it is packed without sound
    SILENCE = "silence"  # its sound is silence, which is learnt
    REFUSE = "refuse"


class SilentAudio(StrEnum):
    """What happens to sound that is silent from beginning to end."""

    KEEP = "keep"
    DROP = "drop"  # the clip is packed without sound


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSound:
    """Number of a file's sound track, None if none can be used, and notes for the summary."""

    track: int | None
    notes: tuple[str, ...]

    def planned(self, kept: KeptFrames) -> PlannedSound | None:
        """The span of sound for a sample with the frames `kept`; None if it gets no sound."""
        if kept.fps is None or (self.track is None and SILENCE not in self.notes):
            return None
        from data_prep.media.clips import PlannedSound

        seconds = len(kept.shown) / kept.fps
        return PlannedSound(begin=kept.begin, seconds=seconds, track=self.track)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundRule:
    """Which sound track of a video is read, for which codec, and what happens if it is missing."""

    rate: int  # samples a second
    channels: int
    missing: MissingAudio = MissingAudio.NONE
    silent: SilentAudio = SilentAudio.KEEP
    track: int | None = None
    """Number of the sound track to read, from 0; None: each file's default track."""

    def find(self, file: Path | BinaryIO) -> FoundSound:
        """Finds the sound track of the video `file` by its header.

        Raises:
            RefusedError: no track can be used, and `missing` refuses such videos.
        """
        from dit.codecs.sound.tracks import SoundError

        try:
            track = self._track(file, self.track)
        except SoundError as error:
            return FoundSound(track=None, notes=(self._missing(error),))
        notes = (WITH,)
        if track.tracks > 1:
            taken = f"number {track.number} of {track.tracks} sound tracks is taken"
            notes += (taken + " (--audio_track)" * (self.track is None),)
        return FoundSound(track=track.number, notes=notes)

    def read(
        self, file: Path | BinaryIO, planned: PlannedSound
    ) -> tuple[Tensor | None, tuple[str, ...]]:
        """Returns (waveform [C, S] of the span `planned`, notes).

        The waveform is None if the sample is to be packed without sound.

        Raises:
            RefusedError: the sound cannot be used, and `missing` refuses such videos.
        """
        import torch

        from dit.codecs.sound.tracks import SoundError

        silence_CS = torch.zeros(self.channels, round(planned.seconds * self.rate))
        if planned.track is None:
            return silence_CS, (SILENCE,)
        try:
            track = self._track(file, planned.track)
            span = track.read_span(planned.begin, planned.seconds)
        except SoundError as error:
            note = self._missing(error)
            return (silence_CS if note == SILENCE else None), (note,)
        samples_CS = torch.from_numpy(span.samples_CS)
        if samples_CS.abs().max() < _SILENT:
            if self.silent is SilentAudio.DROP:
                return None, (f"{_WITHOUT}: it is silent (--silent drop)",)
            return samples_CS, (WITH, "sound that is silent from beginning to end")
        return samples_CS, (WITH, *_notes_of(span))

    def _track(self, file: Path | BinaryIO, number: int | None) -> Any:
        from dit.codecs.sound.tracks import SoundTrack

        return SoundTrack.of(file, rate=self.rate, channels=self.channels, number=number)

    def _missing(self, error: Any) -> str:
        """The note on a sample whose sound has the fault `error`.

        Raises:
            RefusedError: `missing` refuses such videos.
        """
        if self.missing is MissingAudio.REFUSE:
            raise RefusedError(Reason.NO_SOUND, str(error)) from error
        return SILENCE if self.missing is MissingAudio.SILENCE else f"{_WITHOUT}: {error.fault}"


def is_about_sound(note: str) -> bool:
    """Whether a sample's `note` says that it has sound, or why it has none."""
    return note in (WITH, SILENCE) or note.startswith(_WITHOUT)


def _notes_of(span: SoundSpan) -> Iterator[str]:
    """Yields notes on the parts of a clip for which its sound track has no data."""
    if span.late > _NOTICED:
        yield "sound that begins after the clip: silence before it"
    if span.short > _NOTICED:
        yield "sound that ends before the clip: silence after it"
    if span.gaps > _NOTICED:
        yield "sound with gaps: silence in them"
