"""Checks that a network of your own computes on many ranks what it computes on one process.

A module (or `package.module:object`) has three functions:

    build(mesh) -> nn.Module: the whole network, in float32, with the same weights on each mesh
    batches(seed, steps) -> list: a global batch for each step, the same on each rank: tensors in
        dicts, lists or tuples, whose first axis counts samples. All random numbers, such as noise,
        must be in it
    forward_loss(module, batch) -> (sum, count): what this rank adds to the sum of errors, and to
        the number by which it is divided: the loss is sum of sums / sum of counts

`mesh` is a DeviceMesh with the axes dp and cp. A rank's batch has the samples of its place along
dp. The three functions decide what cp does; usually a rank takes a part of the tokens and returns
only their sum and count. `forward_loss` calls `module(...)`, which DistributedDataParallel wraps
(ddp) or `fully_shard` shards (fsdp2), over all ranks. Processes are started on this machine, with
gloo.

Five steps of Adam are compared with one process. Exit code 0: equal; 1: not equal; 2: not checked.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DEFAULT = ("ddp+dp2", "fsdp2+dp2", "ddp+cp2", "fsdp2+cp2", "ddp+dp2+cp2")


class RankLayout(NamedTuple):
    """Numbers of ranks on both axes, and whether weights are whole (`ddp`) or sharded (`fsdp2`)."""

    name: str
    kind: str
    dp: int
    cp: int


def read_layout(name: str) -> RankLayout:
    """Parses the name of a layout such as `ddp+dp2+cp2`.

    Raises:
        argparse.ArgumentTypeError: `name` is not the name of a layout.
    """
    if found := re.fullmatch(r"(ddp|fsdp2)(?:\+dp([1-9]\d*))?(?:\+cp([1-9]\d*))?", name):
        return RankLayout(name, found[1], int(found[2] or 1), int(found[3] or 1))
    raise argparse.ArgumentTypeError(
        f"{name!r} is not the name of a layout; give one such as {', '.join(DEFAULT)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the modules that `argv` names; returns the exit code that this file describes."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("modules", nargs="+", metavar="package.module")
    more = {"nargs": "+", "type": read_layout, "default": [*map(read_layout, DEFAULT)]}
    parser.add_argument("--layouts", help=f"default: {' '.join(DEFAULT)}", **more)
    arguments = parser.parse_args(argv)
    if not __package__:  # started by its path
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.parallel_runs import start  # late: --help answers without torch

    return start(arguments.modules, arguments.layouts)


if __name__ == "__main__":
    sys.exit(main())
