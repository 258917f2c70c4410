"""Python's garbage collection at fixed steps, which are the same on all ranks.

Left to itself, Python looks for unreachable cycles when enough objects were made: on each rank at
another time, while all others wait for it in the next collective. A step leaves no tensor in such a
cycle, so that memory does not wait for a collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from dit.config import TrainConfig


@contextmanager
def manual_gc(config: TrainConfig) -> Iterator[None]:
    """Inside, Python collects nothing by itself, if the run is so configured.

    What exists at the start, mostly modules, lives as long as the run: no later collection looks
    at it again.
    """
    if not config.manual_gc:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_after(step: int, config: TrainConfig) -> None:
    """Collects after every `train.manual_gc_interval`-th step."""
    if config.manual_gc and config.manual_gc_interval and step % config.manual_gc_interval == 0:
        gc.collect()
