"""How often a step makes the host wait for the device."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dit.config import DdpConfig, LoggerConfig, MockGeometry, Precision
from dit.train.trainer import measure_steps
from tests.learning import tiny_run

READS = ("tolist", "numpy", "cpu")
OPERATIONS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal")
"""Those whose result, or its size, the host must know."""


class _Reads:
    """Counts reads by the innermost place in this project or in Megatron-Core."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    def add(self) -> None:
        files = [(f.filename, f.name) for f in traceback.extract_stack() if f.name[:2] != "__"]
        ours = [f"{file} {name}" for file, name in files if "/dit/" in file or "/core/" in file]
        if "/dit/data/" not in ours[-1]:  # what a loader reads has never been on the device
            self.places[ours[-1].rpartition("/")[2]] += 1


class _Functions(TorchFunctionMode):
    def __init__(self, reads: _Reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.reads.add()
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, reads: _Reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in OPERATIONS:
            self.reads.add()
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(reads: _Reads) -> Iterator[None]:
    with _Functions(reads), _Operations(reads):
        yield


CORE = "finalize_model_grads.py finalize_model_grads"
"""`if num_tokens > 0`, up to Megatron-Core 0.18."""
ON_CPU = {
    "pack_draws.py draw_dropout",  # numbers of the host
    "adamw.py _adamw",  # one fused kernel on a GPU
    "per_sample.py _runs",  # a GPU operates on all tokens of a pack at once
}


@pytest.mark.parametrize(
    ("precision", "sharded"), [(Precision.BF16, True), (Precision.FP32, False)]
)
def test_a_step_waits_for_the_device_once(groups, precision, sharded):
    """Beside what Megatron-Core asks for itself."""
    config = tiny_run(precision=precision)
    config = replace(
        config,
        train=replace(config.train, train_iters=20, global_batch_size=2),
        dataset=replace(
            config.dataset,
            num_workers=0,
            mock_samples=(MockGeometry(height=16, width=16, text_length=8),),
            task_encoder_seq_length=256,
            packing_buffer_size=4,
        ),
        ddp=DdpConfig(use_distributed_optimizer=sharded),
        logger=LoggerConfig(log_interval=20),
    )
    reads, steps = _Reads(), 2
    values = measure_steps(config, warm_up=1, steps=steps, around=counted(reads))
    assert not any(one["skipped"] for one in values)
    for place in (CORE, *ON_CPU):
        reads.places.pop(place, None)
    assert reads.places == {"step_metrics.py sum_over_ranks": steps}
