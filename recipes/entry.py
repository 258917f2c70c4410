"""How an entry script ends: its exit code, and one message for what went wrong."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from rich.console import Console

# What a user can mend; anything else is ours, and shown with its traceback.
_MENDABLE = (ValueError, OSError, FloatingPointError)
_LOST_PEER = (
    "another process of the run has died; the launcher's summary names it and its exit code (-9:"
    " killed, most often for want of memory). Started again, the run goes on from its last"
    " checkpoint; --debug shows what was under way"
)


class Parser(argparse.ArgumentParser):
    """One whose errors are those of `run`: its own would be said by every process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the options")


def run(main: Callable[[], int]) -> int:
    """Calls `main` and returns its exit code; 1 after an error, 130 after an early Ctrl-C.

    The first process to fail says why: one message where a user can mend it, else its traceback.
    The others have met the same, or have only lost their peer, and leave in silence.
    """
    _silence()
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_first():
            return 1
        if not isinstance(error, _MENDABLE) and not _is_lost_peer(error):
            raise
        if "--debug" in sys.argv:
            traceback.print_exc()
        _say(_LOST_PEER if _is_lost_peer(error) else str(error))
        return 1
    finally:
        _stop()


def _is_lost_peer(error: Exception) -> bool:
    """Whether gloo or NCCL says that another process is gone, which that one could not say."""
    dist = sys.modules.get("torch.distributed")
    return isinstance(error, RuntimeError) and (
        "gloo" in str(error) or (dist is not None and isinstance(error, dist.DistError))
    )


def _say(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {message}", markup=False)
    # torch.distributed.run ends with a page of its own, which shows what this file holds.
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        note = {"message": "what went wrong is said above", "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(note))


def _silence() -> None:
    """Hides what Megatron-Core and torch say of themselves and a user cannot change."""
    for module in (r"megatron\.", r"torch\."):
        warnings.filterwarnings("ignore", module=module)
    for message in (r"The \.grad attribute of a Tensor", "Please use DTensor instead"):
        warnings.filterwarnings("ignore", message=message)
    # What it logs as an error it raises as well.
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)


def _is_first() -> bool:
    """Whether no other process of this run has failed yet."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ.get("RANK", "0") == "0"  # no store outlives the processes
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=10))))
        return store.add("failed", 1) == 1
    except RuntimeError:  # the launcher is gone, and nobody left who might have spoken
        return True


def _stop() -> None:
    # Looked up, not imported: what needs no torch, such as --help, is not to wait for it.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
