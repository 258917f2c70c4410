"""How far a run has come: what a checkpoint counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """Steps and samples since the start of the run."""

    step: int = 0
    consumed_samples: int = 0  # over all ranks
    samples_before: int = 0  # of them, those from before the data began anew
    of_datasets: dict[str, int] = field(default_factory=dict)  # since then, for each of a blend
    skipped_steps: int = 0  # that changed nothing: loss or gradient was not finite
    skipped_in_a_row: int = 0  # the last of them
    lowest_val_loss: float = math.inf  # of the checkpoints so far

    @property
    def updates(self) -> int:
        """Steps that changed the weights. Learning rate, Adam and average count these."""
        return self.step - self.skipped_steps

    def with_other_data(self) -> TrainProgress:
        """The same steps, where the data begin anew: passes and validation losses are of others."""
        return replace(
            self,
            samples_before=self.consumed_samples,
            of_datasets={},
            lowest_val_loss=math.inf,
        )

    def after(
        self, *, samples: int, of_datasets: Mapping[str, int], skipped: bool
    ) -> TrainProgress:
        """One step later."""
        so_far = self.of_datasets
        return replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            of_datasets={name: so_far.get(name, 0) + n for name, n in of_datasets.items()},
            skipped_steps=self.skipped_steps + skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if skipped else 0,
        )
