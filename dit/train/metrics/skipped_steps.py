"""Steps whose loss or gradient was not finite: which samples were in them.

RUN/skipped_samples.jsonl has one JSON object for each such step:

    step      number of the step
    because   loss, or gradient where the loss was finite
    keys      of the samples whose own loss was not finite; of all samples of the step, where only
              the gradient was not
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

FILE = "skipped_samples.jsonl"
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A step that changed nothing."""

    step: int
    because: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        count, shown = len(self.keys), ", ".join(self.keys[:_SHOWN])
        more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        whose = "of" if self.because == "loss" else "of a step with"
        samples = "1 sample" if count == 1 else f"{count} samples"
        return f"{self.because} {whose} {samples} is not finite: {shown}{more}"


def skip(step: int, *, loss: float, bad: Sequence[str], present: Sequence[str]) -> Skip:
    """The record of a skipped step; collective.

    `bad` are the keys of samples whose loss is not finite on this rank, `present` those of all
    samples that it has read for the step.
    """
    gathered: list[tuple[Sequence[str], Sequence[str]]] = [((), ())] * dist.get_world_size()
    dist.all_gather_object(gathered, (bad, present))
    # Context ranks have parts of the same samples.
    known = [
        dict.fromkeys(key for keys in kind for key in keys) for kind in zip(*gathered, strict=True)
    ]
    return Skip(
        step=step,
        because="gradient" if math.isfinite(loss) else "loss",
        keys=tuple(known[0] or known[1]),
    )
