"""Reasons why samples are refused, and counts of each: no sample is dropped silently.

1. Reject, REMEDIES    the reasons, and a remedy for each
2. RejectCounts        the number of samples refused for each reason
3. Bound               the number of refusals that ends the run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from megatron.energon.savable import FlexState, Savable

BEGIN_ANEW = (
    "begin the data anew with checkpoint.load_data_position=false: weights, optimizer, schedule and"
    " average are kept"
)
"""Advice if a saved loader state cannot be used."""


class DataError(ValueError):
    """An error of the data; the message says what is wrong, where, and how to correct it."""


class Reject(StrEnum):
    """Reasons for refusing a sample; the loader counts each."""

    UNREADABLE = "shard cannot be read"
    MISSING_PART = "a part of the sample is missing"
    CHECKSUM = "payload does not match its checksum"
    UNDECODABLE = "payload cannot be decoded"
    NEWER = "sample is of a newer format than this program reads"
    CHANNELS = "latent has the wrong number of channels"
    NOT_PATCHABLE = "latent does not divide into patches"
    TOO_LONG = "sample is longer than one pack"
    BEYOND_TABLE = "latent is larger than the network takes"
    NO_TEXT = "text is missing or empty"
    TEXT_WIDTH = "text has the wrong width"
    TEXT_ROWS = "text has more rows than the network takes"
    NOT_FINITE = "latent has NaN or Inf"
    TEXT_NOT_FINITE = "text has NaN or Inf"
    NO_INPUT = "an input that the model needs is missing"
    NO_PAIR = "there is no rejected latent"
    INPUT_SHAPE = "an input has the wrong shape"
    INPUT_NOT_FINITE = "an input has NaN or Inf"
    TOKENS = "an input is no number of a token that the network has"
    LOSS_WEIGHT = "loss_weight is no number that is at least 0"
    LOSS_MASK = "loss_mask does not fit the latent, or is no weight"
    LOGVAR = "latent_logvar does not fit the latent, or is no log variance"
    LEVEL_INDEX = "timestep is no whole number of a fixed noise level"


REMEDIES = {
    Reject.UNREADABLE: "restore the shard and its .idx, or pack the data again",
    Reject.MISSING_PART: "pack the data again",
    Reject.CHECKSUM: "restore the shard, or pack the data again",
    Reject.UNDECODABLE: "restore the shard, or pack the data again",
    Reject.NEWER: "update this program, or pack the data with this version of it",
    Reject.CHANNELS: "set model.in_channels to the number of channels in the shards",
    Reject.NOT_PATCHABLE: (
        "set model.patch_spatial and model.patch_temporal to divide the latents, or pack other"
        " sizes"
    ),
    Reject.TOO_LONG: "raise dataset.task_encoder_seq_length, or pack smaller samples",
    Reject.BEYOND_TABLE: (
        "raise model.max_size, or pack smaller samples (some networks take no clips)"
    ),
    Reject.NO_TEXT: "pack the data again with captions",
    Reject.TEXT_WIDTH: "set model.crossattn_emb_size to the width of the texts in the shards",
    Reject.TEXT_ROWS: "pack the data again with a smaller --max_sequence_length",
    Reject.NOT_FINITE: "pack the source again, or leave it out",
    Reject.TEXT_NOT_FINITE: "pack the source again, or leave it out",
    Reject.NO_INPUT: "pack the data again with the encoders of the model's family",
    Reject.NO_PAIR: "pack the data with --rejected_dir, or leave objective.preference out",
    Reject.INPUT_SHAPE: "pack the data again with the encoders of the model's family",
    Reject.INPUT_NOT_FINITE: "pack the source again, or leave it out",
    Reject.TOKENS: "pack the data again with the encoders of the weights that are trained",
    Reject.LOSS_MASK: "pack the data again with --mask_dir, or without",
    Reject.LOGVAR: "pack the source again, or without --latent_distribution",
    Reject.LEVEL_INDEX: (
        "correct it in the .json, or remove it there: 0 to 7 are the k of noise level k/8"
    ),
    Reject.LOSS_WEIGHT: "correct it in the .json, or remove it there: 1 is the default",
}
"""Reason of refusals -> advice for a run in which too many samples have it."""

# The fraction of refused samples is judged over whole passes, of at least and at most so many
# samples: else one fault among the first samples of a good dataset would end the run.
_JUDGE_OVER = (50, 10_000)
_MOST_NAMES, _OTHERS = 30, "(others)"  # names of tensors that nothing reads
MOST_NAMED = 10_000
"""Largest number of refused samples that are listed by name."""


class SampleRefused(Exception):  # noqa: N818 - a verdict on one sample, not a failure of the program
    """The refusal of a sample, with the reason and the values that led to it.

    Messages and logs append the remedy of the reason (`REMEDIES`) to `detail`.
    """

    def __init__(self, reason: Reject, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedSample:
    """A refused sample, as listed in the log and `refused_samples.jsonl`."""

    key: str
    shard: str
    dataset: str
    """Folder of the dataset."""
    reason: str
    detail: str

    @property
    def place(self) -> str:
        """Dataset, shard and key of the sample, for messages."""
        return f"{self.dataset}/{self.shard}, key {self.key}"


@dataclass
class RejectCounts(Savable):
    """Counts of one reader, saved in its state so that a resumed run counts each sample once."""

    read: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)
    """Reason -> place and values of the newest sample refused for it."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Name of a tensor that the model does not read -> number of samples with it."""

    def refuse(self, sample: RefusedSample) -> None:
        """Counts a sample as refused; it must be counted as read already."""
        self.refused[sample.reason] = self.refused.get(sample.reason, 0) + 1
        self.newest[sample.reason] = f"{sample.place}: {sample.detail}"

    def report(self) -> str:
        """A line for each reason of refusals, for messages."""
        return "".join(f"\n  {self.line(reason)}" for reason in sorted(self.refused))

    def line(self, reason: str) -> str:
        """A line with the number of samples refused for `reason`, the newest, and the remedy."""
        return (
            f"{self.refused[reason]} x {reason}; the last one: {self.newest[reason]};"
            f" {REMEDIES[Reject(reason)]}"
        )

    @contextmanager
    def reported(self) -> Iterator[None]:
        """A context that adds the counts of refused samples to the message of a DataError."""
        try:
            yield
        except DataError as error:
            counts = f"{sum(self.refused.values())} of {self.read} samples read were refused"
            listed = f":{report}" if (report := self.report()) else ""
            raise DataError(f"{error}. {counts}{listed}") from None

    def copied(self) -> RejectCounts:
        return RejectCounts(self.read, dict(self.refused), dict(self.newest), dict(self.unknown))

    def save_state(self) -> FlexState:
        return FlexState(asdict(self))

    def restore_state(self, state: FlexState) -> None:
        """Restores the counts in place, because several stages of a reader share this object."""
        self.read = state["read"]
        self.refused = dict(state["refused"])
        self.newest = dict(state["newest"])
        self.unknown = dict(state.get("unknown", {}))  # older states have none


def sum_counts(parts: Iterable[RejectCounts]) -> RejectCounts:
    """The sum of the counts of several readers."""
    total = RejectCounts()
    for part in parts:
        total.read += part.read
        total.newest |= part.newest
        for counts, more in ((total.refused, part.refused), (total.unknown, part.unknown)):
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Limit on the number of refused samples, for all reasons together; beyond it the run ends."""

    fraction: float
    """`dataset.max_bad_fraction`."""
    samples: int
    """Number of samples that this rank reads in one pass."""

    def check(self, counts: RejectCounts, *, readers: int = 1) -> None:
        """Checks that not too many samples were refused.

        `counts` is of a rank, or of one of its `readers`, which are assumed to have read equally
        many samples. The limit is `fraction` times the number of samples read so far, rounded up to
        whole passes of 50 to 10,000 samples.

        Raises:
            DataError: too many samples were refused.
        """
        least, most = _JUDGE_OVER
        a_pass = max(least, min(self.samples, most))
        over = -(-counts.read * readers // a_pass) * a_pass
        if (refused := sum(counts.refused.values())) > self.fraction * over:
            none = "no usable sample: " if refused == counts.read else ""
            raise DataError(
                f"{none}{refused} of {counts.read} samples cannot be used, more than"
                f" dataset.max_bad_fraction={self.fraction} of {over}; do what the lines below say,"
                " or raise dataset.max_bad_fraction to continue without these samples"
            )


class ReaderCounts:
    """Counts and lists the samples that one reader refuses, and checks that they are not too many.

    The check cannot wait for the main process: if nearly every sample is refused, hours may pass
    before a pack brings the counts there.
    """

    def __init__(self, bound: Bound, *, readers: int):
        """Starts with no counts; `readers` is the number of readers on this rank."""
        self.counts = RejectCounts()
        self._bound = bound
        self._readers = readers
        self._fresh: list[RefusedSample] = []

    def accept(self, unknown: Iterable[str] = ()) -> None:
        """Counts a sample as read, and the names of its tensors that the model does not read."""
        self.counts.read += 1
        counts = self.counts.unknown
        for name in unknown:
            # A hostile shard may have a name of its own in each sample.
            known = name[:100] if name in counts or len(counts) < _MOST_NAMES else _OTHERS
            counts[known] = counts.get(known, 0) + 1

    def refuse(self, sample: RefusedSample) -> None:
        """Counts a refused sample, which `accept` counted as read.

        Raises:
            DataError: too many samples were refused; not before 50 were read.
        """
        self.counts.refuse(sample)
        if len(self._fresh) < MOST_NAMED:
            self._fresh.append(sample)
        if self.counts.read > _JUDGE_OVER[0]:  # at least one pass of a small dataset is read first
            self._bound.check(self.counts, readers=self._readers)

    def take_fresh(self) -> tuple[RefusedSample, ...]:
        """Samples refused since the last call, at most MOST_NAMED; the list is then empty."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh
