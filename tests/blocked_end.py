"""pretrain_dit.py with an error on one rank, and process groups that cannot be destroyed then.

python tests/blocked_end.py FAULT RANK [arguments of pretrain_dit.py ...]

NCCL waits where it destroys a communicator whose kernels have no partner any more; gloo does not,
so a group that waits takes its place here. Faults come up in step 3, and those of a save while the
checkpoint of step 2 is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dit.distributed import entry
from recipes import pretrain_dit

SLOW_S, SOON_S = 3, 2


def wait(*_: Any, **__: Any) -> None:
    sys.stderr.write("destroy_process_group waits\n")
    time.sleep(600)


def fail(error: Exception, *, rank: int, call: int) -> Callable[..., Any]:
    """A decorator of what raises when one rank calls it for so many times."""

    def wrap(work: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += dist.get_rank() == rank
            if calls == call:
                raise error
            return work(*args, **kwargs)

        return failing

    return wrap


def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return work(*args)

    return slow


def break_it(fault: str, rank: int) -> None:
    """Makes the fault wait in the code that meets it."""
    from dit.distributed import pack_broadcast
    from dit.train import step, validation
    from dit.train.checkpoint import async_save

    ours = fail(RuntimeError(f"a fault in {fault}"), rank=rank, call=3)
    if fault == "forward":
        step.loss_of = ours(step.loss_of)
    elif fault == "memory":
        full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        step.loss_of = fail(full, rank=rank, call=3)(step.loss_of)
    elif fault == "packs":
        pack_broadcast.flatten_pack = ours(pack_broadcast.flatten_pack)
    elif fault == "validation":  # of the average, after that of the weights
        twice = fail(RuntimeError("a fault in validation"), rank=rank, call=2)
        validation._losses = twice(validation._losses)
    else:
        assert fault in ("save", "late save"), fault
        step.loss_of = ours(step.loss_of)
        async_save._write_distcp = slowly(async_save._write_distcp)
        entry._ALONE_S = SOON_S if fault == "late save" else entry._ALONE_S


def main() -> int:
    from dit.distributed.process_groups import run_megatron_on_cpu

    run_megatron_on_cpu()
    break_it(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group = wait
    return pretrain_dit.main(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(entry.run(main))
