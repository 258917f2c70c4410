"""Makes the key of a sample, and chooses its split by the key alone."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from data_prep.refusals import PrepError

# A tar header has 100 bytes for a name; `.safetensors` takes 12 of them.
_READABLE_CHARACTERS = 64


DEFAULT_SPLIT = "0.9,0.1,0"


class Split(StrEnum):
    """Splits of a dataset; each has its own folder of shards."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


def key_of(source: str) -> str:
    """Key of a sample: the readable end of the path `source`, and a hash of the whole path."""
    readable = re.sub(r"[^A-Za-z0-9-]+", "_", source)[-_READABLE_CHARACTERS:].strip("_")
    # File names need not be valid Unicode.
    name = source.encode("utf-8", "surrogateescape")
    return f"{readable}-{hashlib.blake2b(name, digest_size=6).hexdigest()}"


def position_of(key: str) -> float:
    """Position of `key` in [0, 1) by a hash: equal on every machine, and evenly spread."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"split").digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFractions:
    """Fractions of the samples that go to the splits train, val and test; their sum is 1."""

    train: float
    val: float
    test: float

    def __post_init__(self) -> None:
        values = (self.train, self.val, self.test)
        text = ",".join(f"{value:g}" for value in values)
        if not all(0 <= value <= 1 for value in values):
            raise PrepError(
                f"--split {text}: each fraction must lie in [0, 1], for example 0.9,0.1,0"
            )
        if abs(sum(values) - 1) > 1e-6:
            raise PrepError(
                f"--split {text} sums to {sum(values):g}; the train, val and test fractions must"
                " sum to 1, for example 0.9,0.1,0"
            )

    @classmethod
    def parse(cls, text: str) -> SplitFractions:
        """Parses `train,val,test` such as `0.9,0.1,0`.

        Raises:
            PrepError: `text` is not three numbers in [0, 1] that sum to 1.
        """
        try:
            train, val, test = (float(part) for part in text.split(","))
        except ValueError:
            raise PrepError(
                f"--split {text}: give three fractions train,val,test, for example 0.9,0.1,0"
            ) from None
        return cls(train=train, val=val, test=test)

    @property
    def wanted(self) -> tuple[Split, ...]:
        """The splits with a fraction above 0."""
        return tuple(split for split in Split if getattr(self, split) > 0)

    def split_of(self, key: str) -> Split:
        """The split of the sample with `key`; it does not depend on other samples."""
        position, end = position_of(key), 0.0
        for split in self.wanted:
            end += getattr(self, split)
            if position < end:
                return split
        return self.wanted[-1]  # the fractions may sum to a little less than 1

    def empty(self, found: Counter[Split]) -> tuple[Split, ...]:
        """The splits with a fraction above 0 and no sample; `found` counts their samples."""
        return tuple(split for split in self.wanted if not found[split])

    def check_found(self, found: Counter[Split]) -> None:
        """Checks that each split with a fraction above 0 has a sample; `found` counts the samples.

        Raises:
            PrepError: a split has none.
        """
        for split in self.empty(found):
            raise PrepError(
                f"--split asks for {getattr(self, split):g} of the samples in {split!s}, but none"
                f" of the {found.total()} falls into it (samples are assigned by a hash of"
                " their key); add samples, raise that fraction, or set it to 0 (--split 1,0,0"
                " puts all into train)"
            )


ALL_IN_TRAIN = SplitFractions(train=1, val=0, test=0)


def all_in_train_notice(found: Counter[Split]) -> str:
    """A notice that all samples are in train, because the default split would leave one empty.

    `found` has the number of samples in each split.
    """
    return (
        f"all samples ({found.total()}) are in train: the default --split {DEFAULT_SPLIT} would"
        " leave train, val or test empty. Training validates on them with"
        " dataset.use_train_split_for_val=true; give --split, such as 0.5,0.5,0, to hold some out"
    )
