"""How far a run has come; a checkpoint stores it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """Steps and samples since the start of the run; a checkpoint stores every field."""

    step: int = 0
    consumed_samples: int = 0  # over all ranks
    samples_before: int = 0  # the consumed samples from before the data were restarted
    of_datasets: dict[str, int] = field(default_factory=dict)  # since then, per dataset of a blend
    skipped_steps: int = 0  # steps without an update: loss or gradient was not finite
    skipped_in_a_row: int = 0  # skipped steps since the last update
    updates_before: int = 0  # of the average when the run began (`train.warm_start_ema`)
    lowest_val_loss: float = math.inf  # of all checkpoints so far

    @property
    def updates(self) -> int:
        """Steps that changed the weights. Learning rate, Adam and average count these."""
        return self.step - self.skipped_steps

    def with_other_data(self) -> TrainProgress:
        """The same steps where the data are restarted: epochs and validation losses begin anew."""
        return replace(
            self,
            samples_before=self.consumed_samples,
            of_datasets={},
            lowest_val_loss=math.inf,
        )

    def after(
        self, *, samples: int, of_datasets: Mapping[str, int], skipped: bool
    ) -> TrainProgress:
        """The progress one step later."""
        so_far = self.of_datasets
        return replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            of_datasets={name: so_far.get(name, 0) + n for name, n in of_datasets.items()},
            skipped_steps=self.skipped_steps + skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if skipped else 0,
        )
