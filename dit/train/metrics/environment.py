"""Where and with what a run was started.

RUN/environment.jsonl has one JSON object for each start:

    step       the run had done so many
    software   this program, then the packages that decide its numbers
    device     how many processes on which devices
    layout     how the model is spread over them
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from dit.distributed.process_groups import device
from dit.train.checkpoint.manifest import SOFTWARE

FILE = "environment.jsonl"
_PACKAGES = ("torch", "megatron-core", "megatron-energon", "transformer-engine")


def environment(*, step: int, layout: str) -> dict[str, Any]:
    """The line of a start at `step`."""
    return {
        "step": step,
        "software": SOFTWARE,
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device().type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{dist.get_world_size()} x {_device_name()}",
        "layout": layout,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
