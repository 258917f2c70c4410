"""Frozen matrices in 8 bits, and blocks (layers) of frozen matrices that wait in host memory.

1. rounded         a matrix in float8_e4m3 (arXiv:2209.05433), with a scale for each of its rows
2. FrozenMatrix    the matrix of a linear, dequantized for each product and not saved for backward
3. frozen_product  x W^T, which dequantizes the matrix again in the backward pass
4. round_blocks    rounds the matrices of all layers to 8 bits
5. ByteRows        stores a matrix in rows of bytes, each with its scale, so that ranks can divide
                   the rows
6. place_networks  moves networks to the device, except for `model.blocks_to_swap` blocks
7. BlockPrefetch   starts to copy the next swapped blocks to the device
8. WaitingBlock    the matrices of a swapped block in host memory
9. Places          buffers on the device, which swapped blocks use in turn

A swapped block is copied while the block before it is computed. A product waits until its block is
copied.
"""

# T rows, I inputs, O outputs (of this tensor rank)

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from dit.models.layers import per_sample
from dit.models.layers.adaptable import Adaptable
from dit.models.stacks.offload import Arrival, PinnedRows, PlainCopies, copies_of

ROUNDED = torch.float8_e4m3fn
_FACTOR = torch.float8_e8m0fnu
"""Dtype of scales: powers of two (OCP Microscaling Formats 1.0, Sec. 5.4.1)."""
_MANTISSA, _EXPONENT = 0.875, 9
"""Mantissa and exponent, as by `torch.frexp`, of 448, the largest number of float8_e4m3."""
_MOST_EXPONENT = 100
"""Largest exponent of a scale. With larger ones, scales or scaled numbers would overflow in
bfloat16 and float32."""
_ALIGNMENT = 256
"""Alignment of matrices, in bytes, with which matrix products are fastest."""
_ROW = 16
"""Number of bytes that a GPU thread reads at once."""
_ROWS = PinnedRows()
_AT_ONCE = 2
"""Number of device buffers for swapped blocks: one for the block that is computed, one for the
next."""


def rounded(
    weight_OI: Tensor, *, columns: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """(matrix [O, I] in 8 bits, scale of each row [O], float32).

    A scale is the smallest power of two, between 2^-100 and 2^100, with which the row does not
    overflow. Dequantized numbers have four significant bits, so bfloat16 represents them exactly.
    `columns` are the ranks that divide the columns of the matrix; all of them must call this
    function, and get the same scales.
    """
    most_O = weight_OI.abs().amax(dim=1).float()
    if columns is not None and columns.size() > 1:
        dist.all_reduce(most_O, op=dist.ReduceOp.MAX, group=columns)
    mantissa_O, exponent_O = torch.frexp(most_O)
    exponent_O = exponent_O - _EXPONENT + (mantissa_O > _MANTISSA)
    exponent_O = exponent_O.clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    factor_O = torch.ldexp(torch.ones_like(most_O), exponent_O)
    return (weight_OI.float() / factor_O[:, None]).to(ROUNDED), factor_O


def restored(
    weight_OI: Tensor, factor_O: Tensor, dtype: torch.dtype, *, fused_kernels: bool = False
) -> Tensor:
    """The matrix [O, I] in `dtype`: the 8-bit numbers `weight_OI` times the row scales `factor_O`.

    The result is exact. `fused_kernels` allows our kernel, if it runs on this device.
    """
    if fused_kernels and per_sample.kernels_run_on(weight_OI.device):
        # Imported here, because declaring an operator takes 0.2 s, which other runs need not wait.
        from dit.models.kernels.restored_rows import restored_rows

        return restored_rows(weight_OI.view(torch.uint8), factor_O.view(torch.uint8), dtype)
    return weight_OI.to(dtype).mul_(factor_O[:, None].to(dtype))


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Storage of an 8-bit matrix in rows of bytes: a row's numbers, its scale, then zeros.

    Data-parallel ranks can divide such rows (`dit.distributed.row_shares.PackedRows`). The zeros
    align each row for reads of 16 bytes.
    """

    width: int
    """Number of matrix elements in a row, one byte each."""
    columns: dist.ProcessGroup | None = None
    """Ranks that divide the columns of the matrix and need equal scales (see `rounded`)."""
    fused_kernels: bool = False
    """Whether our kernel may dequantize (see `restored`)."""

    def shape(self, whole: torch.Size) -> torch.Size:
        """The shape of the bytes that store a matrix of shape `whole`, [O, I]."""
        return torch.Size((whole[0], whole[1] // _ROW * _ROW + _ROW))

    def pack(self, rows_OI: Tensor) -> Tensor:
        """The bytes that store the rows `rows_OI`; all ranks of `columns` must call it."""
        narrow_OI, factor_O = rounded(rows_OI, columns=self.columns)
        bytes_OB = narrow_OI.new_zeros(self.shape(rows_OI.shape), dtype=torch.uint8)
        bytes_OB[:, : self.width] = narrow_OI.view(torch.uint8)
        bytes_OB[:, self.width] = factor_O.to(_FACTOR).view(torch.uint8)
        return bytes_OB

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix rows [O, I] in `dtype` that the bytes `rows` store, exactly."""
        narrow_OI, factor_O = rows[:, : self.width].view(ROUNDED), rows[:, self.width].view(_FACTOR)
        return restored(narrow_OI, factor_O, dtype, fused_kernels=self.fused_kernels)


class FrozenMatrix:
    """The frozen matrix of a linear, which may be in 8 bits, in host memory, or sharded."""

    def __init__(self, linear: Any):
        self._linear, self.dtype = linear, linear.weight.dtype
        self.rows: ByteRows | None = None  # if in 8 bits, and ranks divide its rows
        self.factor_O: Tensor | None = None  # scales if otherwise in 8 bits, float8_e8m0fnu
        self.fused_kernels = False  # see `restored`
        self.fetched: Callable[[], Tensor] | None = None  # copies it to the device, if on the host

    @property
    def weight(self) -> nn.Parameter:
        """The linear's weight, read anew: with FSDP it is another tensor in each pass."""
        return self._linear.weight

    def round(self, device: torch.device, *, columns: dist.ProcessGroup | None) -> None:
        """Replaces the linear's weight by 8-bit numbers on `device`, and keeps the scales.

        `columns` is as in `rounded`.
        """
        whole = self.weight.detach().to(device)
        self.weight.data, factor_O = rounded(whole, columns=columns)
        self.factor_O = factor_O.to(_FACTOR)

    def output_of(self, linear: Adaptable, x_TI: Tensor) -> Tensor:
        """The output [T, O] of `linear`, whose matrix this is, for the input `x_TI`.

        It includes the communication between tensor ranks, and the bias.
        """
        sharing, bias = linear.tensor_sharing(), getattr(linear, "bias", None)
        # Transformer Engine's linears without a bias have an empty tensor.
        bias = None if bias is None or not bias.numel() else bias
        if sharing.axis != 1 or sharing.group is None or sharing.group.size() == 1:
            return frozen_product(sharing.exchanged(x_TI), self, bias)
        out_TO = sharing.exchanged(frozen_product(x_TI, self))
        return out_TO if bias is None else out_TO + bias  # added once, after the sum over ranks

    def __call__(self) -> Tensor:
        """The matrix [O, I] on the device, dequantized if it is in 8 bits."""
        weight = self.weight.detach() if self.fetched is None else self.fetched()
        if self.rows is not None:
            return self.rows.unpack(weight, self.dtype)
        if self.factor_O is None:
            return weight
        return restored(weight, self.factor_O, self.dtype, fused_kernels=self.fused_kernels)


def freeze_matrix(linear: Adaptable) -> FrozenMatrix:
    """The `FrozenMatrix` of `linear`; creates it if `linear.frozen` is None.

    From then on it computes the products of the linear.
    """
    linear.frozen = linear.frozen or FrozenMatrix(linear)
    return linear.frozen


def frozen_product(x_TI: Tensor, matrix: FrozenMatrix, bias_O: Tensor | None = None) -> Tensor:
    """The output [T, O] of a linear with a frozen `matrix`; it saves no tensor for backward."""
    out = _Product.apply(x_TI, bias_O, matrix)
    assert isinstance(out, Tensor)
    return out


class _Product(torch.autograd.Function):
    """Autograd function of `frozen_product`, which does not save the dequantized matrix."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, bias_O: Tensor | None, matrix: FrozenMatrix) -> Tensor:
        ctx.matrix = matrix
        return linear(x_TI, matrix(), bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TO,), (of_x, of_bias, _) = gradients, ctx.needs_input_grad
        return (
            gradient_TO.matmul(ctx.matrix()) if of_x else None,
            gradient_TO.flatten(0, -2).sum(0) if of_bias else None,
            None,
        )


def round_blocks(network: Any, device: torch.device) -> None:
    """Rounds the matrices of all linears in the layers of `network` to 8 bits on `device`.

    The linears then compute by their `FrozenMatrix`. All tensor ranks must call it.
    """
    for matrix, columns in _matrices(network):
        matrix.round(device, columns=columns)


def byte_rows(network: Any) -> Iterator[tuple[nn.Parameter, ByteRows]]:
    """Yields (weight, its storage as rows of bytes) for each linear in the layers of `network`.

    The linears then compute by their `FrozenMatrix`, which expects that the caller replaces the
    weight by the bytes.
    """
    for matrix, columns in _matrices(network):
        weight = matrix.weight
        matrix.rows = ByteRows(weight.shape[1], columns, matrix.fused_kernels)
        yield weight, matrix.rows


def _matrices(network: Any) -> Iterator[tuple[FrozenMatrix, dist.ProcessGroup | None]]:
    """Yields (`FrozenMatrix`, ranks that divide its columns or None) for all linears in layers.

    From then on the linears compute by these matrices.
    """
    for layer in _layers(network):
        for one in _linears(layer):
            sharing = one.tensor_sharing()
            matrix = freeze_matrix(one)
            matrix.fused_kernels = network.model.fused_kernels
            yield matrix, sharing.group if sharing.axis == 1 else None


def place_networks(networks: Sequence[Any], device: torch.device, *, swapped: int) -> None:
    """Moves the networks of a pipeline stage to the device, except for `swapped` blocks of each.

    The frozen matrices of these blocks, and of up to two more, stay in pinned host memory, and use
    up to two buffers on the device in turn. The swapped blocks are spread evenly over the blocks
    with frozen matrices, so that there is time to copy one while earlier ones are computed. If
    fewer blocks have frozen matrices, all of them are swapped.
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
        turns = BlockPrefetch(blocks, places)
        for block in blocks.values():
            block.settle(places)
        for stack in network.stacks.values():
            stack.turns = turns


def _layers(network: Any) -> list[nn.Module]:
    """The layers of all stacks on this pipeline stage, in the order of the forward pass."""
    return [layer for stack in network.stacks.values() for layer in stack.layers]


def _linears(layer: nn.Module) -> Iterator[Adaptable]:
    return (module for module in layer.modules() if isinstance(module, Adaptable))


def _waiting_blocks(network: Any, swapped: int) -> dict[int, WaitingBlock]:
    """Chooses the swapped blocks, by the index of their layer on this stage.

    Their frozen matrices are moved to host memory; the network's weights stay empty until
    `WaitingBlock.settle`.
    """
    frozen = [
        (number, linears)
        for number, layer in enumerate(_layers(network))
        if (linears := [one for one in _linears(layer) if one.is_frozen])
    ]
    count = min(swapped + _AT_ONCE, len(frozen))
    # The blocks are divided into `count` ranges, and the last block of each is swapped.
    chosen = [frozen[math.ceil((turn + 1) * len(frozen) / count) - 1] for turn in range(count)]
    return {number: WaitingBlock(linears) for number, linears in chosen}


class _Part(NamedTuple):
    """A matrix in the bytes of its block: position, dtype and shape."""

    bytes: slice
    dtype: torch.dtype
    shape: torch.Size

    def of(self, row: Tensor) -> Tensor:
        return row[self.bytes].view(self.dtype).view(self.shape)


class WaitingBlock:
    """The frozen matrices of a swapped block, in pinned host memory."""

    def __init__(self, linears: Sequence[Adaptable]):
        """Moves the matrices of `linears` to host memory.

        The weights of the linears stay empty until `settle`.
        """
        self.matrices = [freeze_matrix(one) for one in linears]
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
            # Frees the matrix at once, because memory may not suffice for all matrices twice.
            matrix.weight.data = matrix.weight.new_empty(0)

    def settle(self, places: Places) -> None:
        """Makes the linears read their matrices from `places`; the weights stay on the host."""
        for matrix, part in zip(self.matrices, self.parts, strict=True):
            matrix.weight.data = part.of(self.home)
            matrix.fetched = partial(self._fetched, part, places)

    def _fetched(self, part: _Part, places: Places) -> Tensor:
        return part.of(places.take(self))


class _Copy(NamedTuple):
    row: Tensor
    arrival: Arrival


class Places:
    """Device buffers for swapped blocks; the least recently used block is overwritten."""

    def __init__(
        self, count: int, size: int, device: torch.device, *, copies: PlainCopies | None = None
    ):
        self.copies = copies or copies_of(device)
        self.free = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self.count = count
        self.held: OrderedDict[WaitingBlock, _Copy] = OrderedDict()

    def fetch(self, block: WaitingBlock) -> _Copy:
        """Starts to copy `block` to the device, if no buffer has it, and returns the buffer.

        If no buffer is free, the least recently used block is overwritten. The result also has the
        `Arrival` of the copy, for which a reader must wait.
        """
        if block not in self.held:
            row = self.free.pop() if self.free else self.held.popitem(last=False)[1].row
            arrival = self.copies.overwrite(row[: block.home.numel()], block.home)
            self.held[block] = _Copy(row, arrival)
        self.held.move_to_end(block)
        return self.held[block]

    def take(self, block: WaitingBlock) -> Tensor:
        """The buffer with the bytes of `block`; computations after this call wait for the copy."""
        row, arrival = self.fetch(block)
        self.copies.wait(arrival)
        return row


class BlockPrefetch:
    """Starts to copy swapped blocks to the device before the pass needs them.

    `blocks` has the swapped blocks by the index of their layer.
    """

    def __init__(self, blocks: Mapping[int, WaitingBlock], places: Places):
        self.blocks, self.places = dict(sorted(blocks.items())), places

    def forward_from(self, number: int) -> None:
        """Starts to copy the next swapped blocks of the forward pass, from layer `number` on."""
        self._fetch(n for n in self.blocks if n >= number)

    def backward_from(self, number: int) -> None:
        """Starts to copy the next swapped blocks of the backward pass, from layer `number` down."""
        self._fetch(n for n in reversed(self.blocks) if n <= number)

    def _fetch(self, numbers: Iterable[int]) -> None:
        for number in islice(numbers, self.places.count):
            self.places.fetch(self.blocks[number])
