"""Blocks whose matrices are frozen: in 8 bits, and on the host until their turn.

1. round_blocks    the matrices of all layers to 8 bits, one after the other
2. place_networks  networks to the device, but for blocks that wait (`model.blocks_to_swap`)
3. BlockTurns      begins to copy the blocks whose turns come next
4. WaitingBlock    the matrices of a block on the host, as one row of bytes
5. Places          rows of bytes on the device, in which blocks take turns

A block is copied while the one before it, in the order of the pass, is computed. Which block lies
where is no matter of correctness: a product whose block is not there waits for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dit.lora.adapter import Adaptable
from dit.models.stacks.offload import Arrival, PlainCopies, copies_of
from dit.models.stacks.pinned_memory import PinnedRows

_ALIGNMENT = 256
"""Bytes: products read matrices that begin at such addresses as fast as any."""
_ROWS = PinnedRows()
_AT_ONCE = 2
"""Places on the device: of the block that is computed, and of the one that comes."""


def round_blocks(network: Any, device: torch.device) -> None:
    """Rounds the matrices of all layers to 8 bits, each on the device; the others stay there.

    All tensor ranks call it.
    """
    for layer in _layers(network):
        for one in _linears(layer):
            one.freeze_matrix().round(device, columns=one.columns)


def place_networks(networks: Sequence[Any], device: torch.device, *, swapped: int) -> None:
    """Moves the parts of a pipeline stage to the device, less `swapped` blocks of each.

    With two more blocks, which take turns in their places, these wait on the host. They lie evenly
    among those that have frozen matrices, so that there is time to copy one while those before it
    are computed. All of these wait where they are too few.
    """
    every = [_waiting_blocks(network, swapped) if swapped else {} for network in networks]
    waiting = [block for blocks in every for block in blocks.values()]
    for network in networks:
        network.to(device)
    if not waiting:
        return
    most = max(1, max(len(blocks) for blocks in every) - swapped)
    size = max(block.home.numel() for block in waiting)
    places = Places(most, size, device)
    for network, blocks in zip(networks, every, strict=True):
        turns = BlockTurns(blocks, places)
        for block in blocks.values():
            block.settle(places)
        for stack in network.stacks.values():
            stack.turns = turns


def _layers(network: Any) -> list[nn.Module]:
    """Those of all stacks, in the order of a pass."""
    return [layer for stack in network.stacks.values() for layer in stack.layers]


def _linears(layer: nn.Module) -> Iterator[Adaptable]:
    return (module for module in layer.modules() if isinstance(module, Adaptable))


def _waiting_blocks(network: Any, swapped: int) -> dict[int, WaitingBlock]:
    """By the number of the layer on this stage."""
    frozen = [
        (number, linears)
        for number, layer in enumerate(_layers(network))
        if (linears := [one for one in _linears(layer) if one.is_frozen])
    ]
    count = min(swapped + _AT_ONCE, len(frozen))
    # The last of each of `count` stretches.
    chosen = [frozen[math.ceil((turn + 1) * len(frozen) / count) - 1] for turn in range(count)]
    return {number: WaitingBlock(linears) for number, linears in chosen}


class _Part(NamedTuple):
    """Where a matrix lies in the row of its block."""

    bytes: slice
    dtype: torch.dtype
    shape: torch.Size

    def of(self, row: Tensor) -> Tensor:
        return row[self.bytes].view(self.dtype).view(self.shape)


class WaitingBlock:
    """The frozen matrices of a block, in pinned host memory."""

    def __init__(self, linears: Sequence[Adaptable]):
        """Takes them from the device, or from where they are on the host."""
        self.matrices = [one.freeze_matrix() for one in linears]
        self.parts: list[_Part] = []
        end = 0
        for matrix in self.matrices:
            weight = matrix.weight
            self.parts.append(_Part(slice(end, end + weight.nbytes), weight.dtype, weight.shape))
            end += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
        empty = _ROWS.empty if torch.cuda.is_available() else torch.empty
        self.home = empty((end,), dtype=torch.uint8)
        for matrix, part in zip(self.matrices, self.parts, strict=True):
            part.of(self.home).copy_(matrix.weight.detach())
            matrix.weight.data = matrix.weight.new_empty(0)

    def settle(self, places: Places) -> None:
        """From now on products find the matrices in `places`, and all others on the host."""
        for matrix, part in zip(self.matrices, self.parts, strict=True):
            matrix.weight.data = part.of(self.home)
            matrix.fetched = partial(self._fetched, part, places)

    def _fetched(self, part: _Part, places: Places) -> Tensor:
        return part.of(places.take(self))


class _Copy(NamedTuple):
    row: Tensor
    arrival: Arrival


class Places:
    """Rows of bytes on the device; the block that was asked for longest ago makes room."""

    def __init__(
        self, count: int, size: int, device: torch.device, *, copies: PlainCopies | None = None
    ):
        self.copies = copies or copies_of(device)
        self.free = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self.count = count
        self.held: OrderedDict[WaitingBlock, _Copy] = OrderedDict()

    def fetch(self, block: WaitingBlock) -> _Copy:
        """Begins to copy a block, unless it is there or on its way; nothing waits for it."""
        if block not in self.held:
            row = self.free.pop() if self.free else self.held.popitem(last=False)[1].row
            arrival = self.copies.overwrite(row[: block.home.numel()], block.home)
            self.held[block] = _Copy(row, arrival)
        self.held.move_to_end(block)
        return self.held[block]

    def take(self, block: WaitingBlock) -> Tensor:
        """The bytes of a block; what is computed from now on waits for them."""
        row, arrival = self.fetch(block)
        self.copies.wait(row, arrival)
        return row


class BlockTurns:
    """The blocks of a part of a network that wait, by the number of their layer."""

    def __init__(self, blocks: Mapping[int, WaitingBlock], places: Places):
        self.blocks, self.places = dict(sorted(blocks.items())), places

    def forward_from(self, number: int) -> None:
        """The forward pass has come to a layer."""
        self._fetch(n for n in self.blocks if n >= number)

    def backward_from(self, number: int) -> None:
        """The backward pass has."""
        self._fetch(n for n in reversed(self.blocks) if n <= number)

    def _fetch(self, numbers: Iterable[int]) -> None:
        for number in islice(numbers, self.places.count):
            self.places.fetch(self.blocks[number])
