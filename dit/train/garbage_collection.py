"""Python's garbage collection at fixed steps, which are the same on all ranks.

Left to itself, Python looks for unreachable cycles when enough objects were made: on each rank at
another time, while all others wait for it in the next collective. A step leaves no tensor in such a
cycle, so that memory does not wait for a collection.

Without a GPU a step makes and frees many large tensors, and the C library keeps most of their
memory between small objects that live on. It grows to many times what is in use, so it is given
back.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dit.config import TrainConfig

_TRIM_INTERVAL = 10
"""Steps between two returns of free memory: the pages that the next step needs are made anew."""


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
    """Collects after every `train.manual_gc_interval`-th step, and returns free memory."""
    if config.manual_gc and config.manual_gc_interval and step % config.manual_gc_interval == 0:
        gc.collect()
    if not torch.cuda.is_available() and step % _TRIM_INTERVAL == 0:
        return_free_memory()


def return_free_memory() -> None:
    """Gives the pages that malloc holds free back to the system, where glibc is the C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
