"""What one pipeline stage hands on to the next: named blocks of numbers in one tensor.

A family declares the shape of every block that its layers read, for a given pack. Megatron-Core
sends one tensor of three axes, so that the blocks lie in it as rows of the model's width, one block
after the other. The gradient travels back in the same way: a block that a stage did not read comes
back as zeros.
"""

# D model width

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

Shapes = Mapping[str, tuple[int, ...]]
"""Blocks by name, in the order in which they travel."""


def _rows(shape: tuple[int, ...], width: int) -> int:
    return -(-math.prod(shape) // width)


def stage_rows(shapes: Shapes, width: int) -> int:
    """Rows of `width` numbers that the blocks take; each block begins a row."""
    return sum(_rows(shape, width) for shape in shapes.values())


def pack_stage_state(blocks: Mapping[str, Tensor], shapes: Shapes, width: int) -> Tensor:
    """The blocks as rows [rows, 1, D]; it takes them in the order of `shapes`.

    All travel in the type of the hidden states, which come first.
    """
    parts, dtype = [], blocks[next(iter(shapes))].dtype
    for name, shape in shapes.items():
        assert blocks[name].shape == shape, f"{name} is {tuple(blocks[name].shape)}, not {shape}"
        flat = blocks[name].flatten().to(dtype)
        parts.append(pad(flat, (0, -len(flat) % width)).view(-1, width))
    return torch.cat(parts)[:, None]


def unpack_stage_state(rows: Tensor, shapes: Shapes, width: int) -> dict[str, Tensor]:
    """The inverse of `pack_stage_state`."""
    parts = rows[:, 0].split([_rows(shape, width) for shape in shapes.values()])
    return {
        name: part.flatten()[: math.prod(shape)].view(shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
