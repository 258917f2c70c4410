"""What pictures lose to whole patches, counted before anything is encoded."""

from __future__ import annotations

from dataclasses import dataclass

from data_prep.media.clips import Entry


@dataclass
class Cropping:
    """Counts of a plan."""

    total: int = 0  # samples with a size
    cropped: int = 0
    largest: int = 0  # pixels that a side loses

    def add(self, entry: Entry) -> None:
        """Counts a sample that keeps its scale; one that is scaled to a bucket loses more."""
        if entry.size is None or entry.resized is None:
            return
        self.total += 1
        if tuple(entry.resized) == (entry.width, entry.height):
            lost = max(a - b for a, b in zip(entry.resized, entry.size, strict=True))
            self.cropped += lost > 0
            self.largest = max(self.largest, lost)

    def notices(self, size_multiple: int | None, cell: int) -> list[str]:
        """What to say of it, and the option that changes it; `cell` pixels are a latent cell."""
        if not self.cropped or size_multiple is None:
            return []
        remedy = (
            f"; for a model with model.patch_spatial=1, --size_multiple {cell} crops less"
            if size_multiple > cell
            else ""
        )
        return [
            f"{self.cropped} of {self.total} samples lose up to {self.largest} pixels of a side,"
            f" because sides become multiples of --size_multiple {size_multiple}{remedy}"
        ]
