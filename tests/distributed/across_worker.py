"""Attention of one shared row of tokens to another on two ranks; `test_rows_across.py` starts it.

Each rank computes the whole on its own, too, and compares outputs and gradients with its part.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dit.config import ContextComm
from dit.distributed.process_groups import start_processes
from dit.models.attention.spans import attend_one_by_one
from dit.models.layers.context_parallel import Context
from dit.models.layers.joint_order import row_exchange, text_row
from tests.packs import tiny_model

LENGTHS = {"video": [24, 30, 16, 0, 5], "sound": [9, 0, 14, 4, 1]}
HEADS, WIDTH = 4, 8
CPU = torch.device("cpu")


def drawn(*, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {name: (sum(lengths), HEADS, WIDTH) for name, lengths in LENGTHS.items()}
    made = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return {name: x.requires_grad_(seed == 1) for name, x in made.items()}


def attended(q: Tensor, k: Tensor, v: Tensor, asking: str, answering: str) -> Tensor:
    """The definition, sample by sample; zeros where there is nothing to attend to."""
    ends = [[0, *torch.tensor(LENGTHS[name]).cumsum(0).tolist()] for name in (asking, answering)]
    parts = []
    for (a, b), (c, d) in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True):
        score = torch.einsum("thk,shk->hts", q[a:b], k[c:d]) * WIDTH**-0.5
        parts.append(torch.einsum("hts,shk->thk", score.softmax(-1), v[c:d]))
    return torch.cat(parts)


def compared(comm: ContextComm, *, multiple: int) -> float:
    """The largest difference, of outputs and of gradients, over what they are compared with."""
    context = Context(group=dist.group.WORLD, comm=comm)
    rows = {
        name: text_row(lengths, share=context.share, multiple=multiple, device=CPU)
        for name, lengths in LENGTHS.items()
    }
    x, away = drawn(seed=1), drawn(seed=2)
    whole, mine, differences = list[Tensor](), list[Tensor](), list[float]()
    for asking, answering in (("video", "sound"), ("sound", "video")):
        wanted = attended(x[asking], 0.5 * x[answering], x[answering] + 1, asking, answering)
        here = {name: rows[name].of(x[name]) for name in x}
        exchange = row_exchange(rows[asking].row, rows[answering].row, context=context, device=CPU)
        kv = 0.5 * here[answering], here[answering] + 1
        found = context.attend_across(attend_one_by_one, here[asking], kv, exchange)
        source_L = rows[asking].source_L
        real = source_L < len(wanted)
        differences.append(float((found[real] - wanted[source_L[real]]).abs().max()))
        whole.append((wanted * away[asking]).sum())
        mine.append((found[real] * away[asking][source_L[real]]).sum())
    grads = (torch.autograd.grad(sum(total), [*x.values()]) for total in (mine, whole))
    for own, wanted in zip(*grads, strict=True):
        found = own.clone()
        dist.all_reduce(found)
        differences.append(float((found - wanted).abs().max() / wanted.abs().max()))
    return max(differences)


def main() -> int:
    start_processes(seed=1, model=tiny_model())
    for comm in (ContextComm.A2A, ContextComm.ALL_GATHER):
        for multiple in (1, 4):
            away = compared(comm, multiple=multiple)
            sys.stdout.write(f"{comm} {multiple} {away:.1e}\n")
            assert away < 1e-5, comm
    sys.stdout.write("both rows attend as on one rank\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
