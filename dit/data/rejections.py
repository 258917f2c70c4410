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
    NEWER = "sample is of a newer format than this program reads"
    CHANNELS = "latent has the wrong number of channels"
    NOT_PATCHABLE = "latent does not divide into patches"
    TOO_LONG = "sample is longer than one pack"
    BEYOND_TABLE = "latent is larger than the learnable positions"
    NO_TEXT = "text is missing or empty"
    TEXT_WIDTH = "text has the wrong width"
    NOT_FINITE = "latent has NaN or Inf"
    TEXT_NOT_FINITE = "text has NaN or Inf"


REMEDIES = {
    Reject.UNREADABLE: "restore the shard and its .idx, or pack the data again",
    Reject.MISSING_PART: "pack the data again",
    Reject.CHECKSUM: "restore the shard, or pack the data again",
    Reject.UNDECODABLE: "restore the shard, or pack the data again",
    Reject.NEWER: "update this program, or pack the data with this version of it",
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

# The part of refused samples is judged over whole passes, within these bounds on their samples:
# else one fault in a good dataset would end the run when it is among the first that are read.
_JUDGE_OVER = (50, 10_000)
MOST_NAMED = 10_000
"""Refused samples that are kept by name."""


class SampleRefused(Exception):  # noqa: N818 - a verdict on one sample, not a failure of the program
    """Raised while a sample is cooked; carries the reason and the values that led to it."""

    def __init__(self, reason: Reject, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedSample:
    """A sample that was left out, as a run names it."""

    key: str
    shard: str
    dataset: str
    """Its folder."""
    reason: str
    detail: str

    @property
    def place(self) -> str:
        """Shard and key, for messages."""
        return f"{self.dataset}/{self.shard}, key {self.key}"


@dataclass
class RejectCounts(Savable):
    """Counts of one reader. Part of its state, so a resumed run counts each sample once."""

    read: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)
    """For every reason the newest sample that had it: place and values."""

    def refuse(self, sample: RefusedSample) -> None:
        """Counts a sample that has been counted as read, and was found unusable since."""
        self.refused[sample.reason] = self.refused.get(sample.reason, 0) + 1
        self.newest[sample.reason] = f"{sample.place}: {sample.detail}"

    def report(self) -> str:
        """One line for each reason."""
        return "".join(f"\n  {self.line(reason)}" for reason in sorted(self.refused))

    def line(self, reason: str) -> str:
        """How often it was met, the newest sample that had it, and what to do."""
        return (
            f"{self.refused[reason]} x {reason}; the last one: {self.newest[reason]};"
            f" {REMEDIES[Reject(reason)]}"
        )

    def snapshot(self) -> RejectCounts:
        return RejectCounts(self.read, dict(self.refused), dict(self.newest))

    def save_state(self) -> FlexState:
        return FlexState(asdict(self))

    def restore_state(self, state: FlexState) -> None:
        """Takes the saved counts over in place: readers share this object."""
        self.read = state["read"]
        self.refused = dict(state["refused"])
        self.newest = dict(state["newest"])


def sum_counts(tallies: Iterable[RejectCounts]) -> RejectCounts:
    """The counts of several readers together."""
    total = RejectCounts()
    for tally in tallies:
        total.read += tally.read
        total.newest |= tally.newest
        for reason, count in tally.refused.items():
            total.refused[reason] = total.refused.get(reason, 0) + count
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How many samples may be refused, for whatever reason, before the run ends."""

    fraction: float
    """`dataset.max_bad_fraction`."""
    samples: int
    """Of one pass of the rank."""

    def check(self, tally: RejectCounts, *, readers: int = 1) -> None:
        """Judges the counts of a rank, or of one of its `readers` as if all had read as much.

        Raises:
            DataError: too many were refused.
        """
        least, most = _JUDGE_OVER
        a_pass = max(least, min(self.samples, most))
        over = -(-tally.read * readers // a_pass) * a_pass
        if (refused := sum(tally.refused.values())) > self.fraction * over:
            none = "no usable sample: " if refused == tally.read else ""
            raise DataError(
                f"{none}{refused} of {tally.read} samples cannot be used, more than"
                f" dataset.max_bad_fraction={self.fraction} of {over}; see below what is wrong with"
                " them, or raise dataset.max_bad_fraction to go on without them"
            )


class ReaderCounts:
    """What one reader counts and names.

    It judges its own counts as well: where nearly every sample is refused, a pack that could bring
    them to the main process may take hours.
    """

    def __init__(self, bound: Bound, *, readers: int):
        """`readers` are those of the rank."""
        self.tally = RejectCounts()
        self._bound = bound
        self._readers = readers
        self._fresh: list[RefusedSample] = []

    def accept(self) -> None:
        self.tally.read += 1

    def refuse(self, sample: RefusedSample) -> None:
        """Of a sample that has been counted as read.

        Raises:
            DataError: too many were refused.
        """
        self.tally.refuse(sample)
        if len(self._fresh) < MOST_NAMED:
            self._fresh.append(sample)
        if self.tally.read > _JUDGE_OVER[0]:  # a pass of few samples is looked at as a whole first
            self._bound.check(self.tally, readers=self._readers)

    def take_fresh(self) -> tuple[RefusedSample, ...]:
        """Those refused since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh
