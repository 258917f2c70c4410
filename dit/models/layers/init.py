"""Initial values that depend on the seed and on a weight's name, never on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

Draw = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


def fill(model: MegatronModule, draw: Draw, *, seed: int) -> None:
    """Gives each weight its part of `draw(name, whole shape, generator)`.

    The generator is seeded by (seed, name, layer), and the whole tensor is drawn in float32 before
    this rank takes its shard, so that every layout starts from the same numbers.
    """
    for shard in nested_values(model.sharded_state_dict()):
        if not isinstance(shard, ShardedTensor) or shard.data is None:
            continue
        axes = shard.prepend_axis_num  # the layer number is such an axis
        name = f"{shard.key}/{shard.global_offset[:axes]}"
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = draw(shard.key, shard.global_shape[axes:], generator)
        mine = zip(shard.global_offset[axes:], shard.local_shape, strict=True)
        with torch.no_grad():
            shard.data.copy_(whole[tuple(slice(at, at + size) for at, size in mine)])


def initialise(
    model: MegatronModule, *, seed: int, std: float | None, zero: Callable[[str], bool]
) -> None:
    """The values that training starts from.

    Norms are 1; biases are 0, and so are the matrices that `zero` names by their key in a
    checkpoint; other matrices are normal with `std`, or 1 / sqrt(inputs) where it is None.
    """

    def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        if zero(name):
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator) * (std or shape[1] ** -0.5)

    fill(model, draw, seed=seed)


def randomise(model: MegatronModule, *, seed: int) -> None:
    """Random values for every weight, norms included: what tests of equality start from.

    With the zeros of `initialise`, most weights have no gradient and broken code passes.
    """

    def draw(_: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        wave = torch.randn(shape, generator=generator)
        return 1 + 0.2 * wave if len(shape) == 1 else wave * shape[1] ** -0.5

    fill(model, draw, seed=seed)
