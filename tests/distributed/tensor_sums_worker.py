"""Sums over two tensor ranks, of tensors and gradients that are not contiguous or not theirs alone.

`test_tensor_sums.py` starts it. On rank r, what is summed has r + 1 everywhere: each sum is 3.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from dit.distributed.process_groups import process_groups, start_processes
from dit.models.layers.adaptable import TensorSharing
from dit.models.layers.parallel_linear import transformer_config
from dit.models.layers.queries_and_keys import _SumOverRanks
from tests.packs import tiny_model

T, D = 4, 8
MODEL = tiny_model(tensor_model_parallel_size=2)


def own(*shape: int) -> Tensor:
    """What this rank gives, as autograd often has it: one number in memory."""
    return torch.full((1,) * len(shape), dist.get_rank() + 1.0).expand(shape)


def sharing(axis: int) -> TensorSharing:
    return TensorSharing(axis=axis, group=process_groups().tp)


def forward() -> list[Tensor]:
    """Outputs of a split input: expanded, transposed, contiguous."""
    given = (own(T, D), own(D, T).contiguous().T, own(T, D).contiguous())
    return [sharing(1).exchanged(x) for x in given]


def backward() -> list[Tensor]:
    """Gradients of an input that all ranks have, whose outputs are split."""
    x = torch.zeros(T, D, requires_grad=True)
    sharing(0).exchanged(x).backward(own(T, D))
    y = torch.zeros(T, D, requires_grad=True)
    (sharing(0).exchanged(y).sum() * (dist.get_rank() + 1)).backward()
    return [grad for grad in (x.grad, y.grad) if grad is not None]


def shared_gradient() -> list[Tensor]:
    """An addition hands one gradient to both terms, and only the first is summed."""
    x, other = (torch.zeros(T, D, requires_grad=True) for _ in range(2))
    (other * 1 + sharing(0).exchanged(x * 1)).backward(own(T, D).contiguous())
    assert x.grad is not None and other.grad is not None
    assert torch.equal(other.grad, own(T, D))
    return [x.grad]


def norms_across_heads() -> list[Tensor]:
    """The sum of squares of all ranks leaves those of one, and another branch's gradient."""
    squares = own(T, D).contiguous()
    total = _SumOverRanks.apply(squares, process_groups().tp)
    x, other = (torch.zeros(T, D, requires_grad=True) for _ in range(2))
    (other * 1 + _SumOverRanks.apply(x * 1, process_groups().tp)).backward(own(T, D).contiguous())
    assert x.grad is not None and other.grad is not None
    assert torch.equal(other.grad, own(T, D)) and torch.equal(squares, own(T, D))
    return [total, x.grad]


def linears() -> list[Tensor]:
    """Of Megatron-Core: the gradient of the input of one, the output of the other."""
    options: Any = {"config": transformer_config(MODEL), "bias": False, "skip_bias_add": False}
    options |= {"init_method": torch.nn.init.ones_, "tp_group": process_groups().tp}
    column = ColumnParallelLinear(D, D, gather_output=False, **options)
    row = RowParallelLinear(D, D, input_is_parallel=True, **options)
    for weight in (*column.parameters(), *row.parameters()):
        torch.nn.init.constant_(weight, 2 / D)  # on each of two ranks, half of the inputs
    x = torch.zeros(T, D, requires_grad=True)
    column(x)[0].backward(own(T, D // 2))
    output, _ = row(own(T, D // 2))
    output.sum().backward()
    assert x.grad is not None
    return [x.grad, output.detach()]


def work() -> None:
    start_processes(seed=1, model=MODEL)
    for part in (forward, backward, shared_gradient, norms_across_heads, linears):
        for number, found in enumerate(part()):
            assert torch.equal(found, torch.full((T, D), 3.0)), f"{part.__name__} {number}: {found}"
    if dist.get_rank() == 0:
        sys.stdout.write("all sums are complete\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
