"""Finds which sums the gradient of each weight needs, from the types of one forward pass.

    pip install spmd_types
    python -m tools.gradient_types                       every tiny network of every family
    python -m tools.gradient_types --sizes flux2_dev --layouts tp2+sp+lora --table

spmd_types (https://github.com/meta-pytorch/spmd_types) gives a tensor one of four types for each
axis of ranks. They differ in the gradient:

    I  the same value on all ranks, and the same gradient
    R  the same value, and each rank has a part of the gradient, which must be summed
    V  each rank has its own value and gradient
    P  each rank has a part of a sum, and the same gradient

It follows the types through a forward pass and refuses what would leave a gradient without its sum:
an I that is combined with a V without the copy between them, or a P that is used as the whole. So
the sums after the backward pass, which depend on attributes of weights, need not be run: a weight
is declared R if Megatron-Core sums its gradient over tensor ranks, V if its attributes say that it
is split over them, else I. A wrong attribute results in a type that the pass refuses.

It does not see sums and sends after the backward pass itself (`recipes/check_layouts.py` runs
them), pipeline stages, values, and on which rank an index was computed. Processes are not started:
torch's `fake` back end leaves tensors as they are, which does not matter to types.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dit.config import Problems
from dit.layout_check.names import ALL, chosen_sizes

LAYOUTS = ("tp2", "tp2+sp", "cp2", "cp2+ag", "tp2+cp2", "tp2+sp+cp2", "tp2+sp+cp2+ag")


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the types of the networks and layouts that `argv` names.

    Layouts that do not divide a network are skipped. Returns exit code 0 if all others have the
    right types, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.gradient_types",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", default=[ALL], help="families or named sizes")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="as in check_layouts.py")
    parser.add_argument("--table", action="store_true", help="what is done with which weights")
    arguments = parser.parse_args(argv)
    # Imported late: --help answers without torch.
    from tools.typed_passes import check, disagreements, table, trial, weight_traits

    wrong = passed = 0
    for size in chosen_sizes(arguments.sizes):
        for name in arguments.layouts:
            try:
                given = trial(size, name)
            except Problems as problems:
                sys.stdout.write(f"{size} {name} does not divide: {problems}\n")
                continue
            traits = weight_traits(given)
            found = [*disagreements(given, traits), *filter(None, [check(given, traits)])]
            wrong, passed = wrong + bool(found), passed + (not found)
            if arguments.table:
                sys.stdout.write(f"{size} {name}\n{table(traits)}\n")
            for line in found:
                sys.stderr.write(f"{size} {name}: {line}\n")
    sys.stdout.write(f"{passed} networks on layouts have the right types, {wrong} have not\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
