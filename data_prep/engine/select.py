"""Which engine the options ask for."""

from __future__ import annotations

import os
from argparse import Namespace

from data_prep.engine.processes import Engine, InProcess, Processes
from data_prep.engine.ranks import Ranks
from data_prep.refusals import PrepError

_FEW = 16  # blocks


def engine_of(args: Namespace, ranks: Ranks) -> Engine:
    """The engine; each launched rank has the GPU of its local number to itself.

    Raises:
        PrepError: it cannot be had.
    """
    if args.num_workers is not None and args.num_workers < 0:
        raise PrepError(f"--num_workers {args.num_workers} must be at least 0")
    if args.engine == "ray":
        from data_prep.engine.ray_engine import RayWorkers

        if ranks.world > 1:
            raise PrepError("--engine ray spreads the work itself; start one process")
        return RayWorkers(workers=args.num_workers)
    devices = _devices(ranks)
    workers, few = args.num_workers, 0
    if workers is None:
        few = _FEW
        on_gpus = devices[0] != "cpu"
        workers = len(devices) if on_gpus else max(1, len(os.sched_getaffinity(0)) // ranks.world)
    return (
        InProcess(devices[0])
        if not workers
        else Processes(workers=workers, devices=devices, few=few)
    )


def _devices(ranks: Ranks) -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return ("cpu",)
    if ranks.world > 1:
        return (f"cuda:{ranks.local % count}",)
    return tuple(f"cuda:{index}" for index in range(count))
