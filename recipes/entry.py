"""How an entry script ends: its exit code, and one message for what went wrong."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable

from rich.console import Console


def run(main: Callable[[], int]) -> int:
    """Calls `main` and returns its exit code; 1 after an error.

    What a user can mend (ValueError, OSError) is shown as one message, by one process only where
    several have met the same; anything else with its traceback.
    """
    _silence()
    try:
        return main()
    except (ValueError, OSError, FloatingPointError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        if _is_first(str(error)):
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                f"error: {error}", markup=False
            )
        return 1
    finally:
        _stop()


def _silence() -> None:
    """Hides what Megatron-Core and torch say of themselves and a user cannot change."""
    for module in (r"megatron\.", r"torch\."):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")


def _is_first(message: str) -> bool:
    """Whether no other process of this run has shown the same message yet."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ.get("RANK", "0") == "0"  # no store outlives the processes
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    name = hashlib.blake2b(message.encode(), digest_size=8).hexdigest()
    return store.add(f"error/{name}", 1) == 1


def _stop() -> None:
    # Looked up, not imported: what needs no torch, such as --help, is not to wait for it.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
