"""Which samples share a pack: arithmetic on integers, no samples and no randomness."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Partition of range(len(lengths)) into bins of at most `capacity`.

    Longest first, each into the bin where it leaves the least room; on equal lengths the earlier
    one goes first. Members ascend within a bin, and bins by their first member, so the order in
    which packs are trained does not follow their lengths.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"lengths[{index}]={length} must lie in [1, {capacity}]")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tightest = bisect_left(room, (lengths[index], -1))
        if tightest < len(room):
            left, chosen = room.pop(tightest)
        else:
            left, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return sorted(sorted(members) for members in bins)


def ready_bins(
    bins: Sequence[Sequence[int]], lengths: Sequence[int], *, enough: int
) -> list[list[int]]:
    """Bins that hold `enough` tokens, and the one with sample 0, the longest in waiting.

    The rest is better tried again together with newcomers: it raises the fill of a buffer of 64
    to that of one of 1024. Taking the oldest along each time means that nobody starves.
    """
    return [
        list(members)
        for members in bins
        if 0 in members or sum(lengths[i] for i in members) >= enough
    ]
