"""Why samples are left out, and how many: nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from megatron.energon.savable import FlexState, Savable

BEGIN_ANEW = (
    "begin the data anew with checkpoint.load_data_position=false: weights, optimizer, schedule and"
    " average go on"
)
"""What may be done where the data cannot go on as they stood."""


class DataError(ValueError):
    """The data cannot be used as they are; the message says what, where and what to do."""


class Reject(StrEnum):
    """Why a sample was left out; the loader counts each."""

    UNREADABLE = "shard cannot be read"
    MISSING_PART = "a part of the sample is missing"
    CHECKSUM = "payload does not match its checksum"
    UNDECODABLE = "payload cannot be decoded"
    CHANNELS = "latent has the wrong number of channels"
    NOT_PATCHABLE = "latent does not divide into patches"
    TOO_LONG = "sample is longer than one pack"
    BEYOND_TABLE = "latent is larger than the learnable positions"
    NO_TEXT = "text is missing or empty"
    TEXT_WIDTH = "text has the wrong width"
    NOT_FINITE = "latent has NaN or Inf"
    TEXT_NOT_FINITE = "text has NaN or Inf"


REMEDIES = {
    Reject.UNREADABLE: "restore the shard, or pack the data again",
    Reject.MISSING_PART: "pack the data again",
    Reject.CHECKSUM: "restore the shard, or pack the data again",
    Reject.UNDECODABLE: "restore the shard, or pack the data again",
    Reject.CHANNELS: "set model.in_channels to what the shards hold",
    Reject.NOT_PATCHABLE: "choose a patch that divides the latents, or pack other sizes",
    Reject.TOO_LONG: "raise dataset.task_encoder_seq_length, or pack smaller samples",
    Reject.BEYOND_TABLE: "raise model.max_size, or pack smaller samples",
    Reject.NO_TEXT: "pack the data again with captions",
    Reject.TEXT_WIDTH: "set model.crossattn_emb_size to what the shards hold",
    Reject.NOT_FINITE: "pack the source again, or leave it out",
    Reject.TEXT_NOT_FINITE: "pack the source again, or leave it out",
}
"""What to do where it happens to more samples than one likes."""

DAMAGE = (Reject.UNREADABLE, Reject.MISSING_PART, Reject.CHECKSUM, Reject.UNDECODABLE)
"""Faults of the file, whose part of all samples `dataset.max_bad_fraction` bounds."""


class Refused(Exception):  # noqa: N818 - a verdict on one sample, not a failure of the program
    """Raised while a sample is cooked; carries the reason and the values that led to it."""

    def __init__(self, reason: Reject, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Tally(Savable):
    """Counts of one reader. Part of its state, so a resumed run counts each sample once."""

    read: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)
    """For every reason the newest sample that had it: place and values."""

    def accept(self) -> None:
        self.read += 1

    def refuse(self, refusal: Refused, *, place: str) -> None:
        self.read += 1
        self.refuse_accepted(refusal, place=place)

    def refuse_accepted(self, refusal: Refused, *, place: str) -> None:
        """Of a sample that has been counted as read, and was found unusable since."""
        reason = refusal.reason.value  # plain strings, because they are part of a saved state
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.newest[reason] = f"{place}: {refusal.detail}"

    @property
    def damaged(self) -> int:
        return sum(self.refused.get(reason, 0) for reason in DAMAGE)

    def report(self) -> str:
        """One line for each reason."""
        return "".join(f"\n  {self.line(reason)}" for reason in sorted(self.refused))

    def line(self, reason: str) -> str:
        """How often it was met, the newest sample that had it, and what to do."""
        return (
            f"{self.refused[reason]} x {reason}; the last one: {self.newest[reason]};"
            f" {REMEDIES[Reject(reason)]}"
        )

    def snapshot(self) -> Tally:
        return Tally(self.read, dict(self.refused), dict(self.newest))

    def save_state(self) -> FlexState:
        return FlexState(asdict(self))

    def restore_state(self, state: FlexState) -> None:
        """Takes the saved counts over in place: readers share this object."""
        self.read = state["read"]
        self.refused = dict(state["refused"])
        self.newest = dict(state["newest"])


def add_up(tallies: Iterable[Tally]) -> Tally:
    """The counts of several readers together."""
    total = Tally()
    for tally in tallies:
        total.read += tally.read
        total.newest |= tally.newest
        for reason, count in tally.refused.items():
            total.refused[reason] = total.refused.get(reason, 0) + count
    return total
