"""The weights of a network before, in and after its layers, counted on the network itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dit.config import CUSTOM_SIZE, ModelConfig, Precision, Recompute, RecomputeMethod
from dit.models.registry import network_spec

if TYPE_CHECKING:  # Megatron-Core takes 4 s to import
    from torch import nn

    from dit.models.layers.adaptable import Adaptable
    from dit.models.stacks.stacked_transformer import StackedTransformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear of a network, as one tensor rank has it."""

    inputs: int
    outputs: int
    axis: int | None  # axis of its weight that tensor ranks divide: 0 outputs, 1 inputs; or None
    tensor: int  # number of tensor ranks
    parts: int  # number of linears of the published network that it joins

    @property
    def all_outputs(self) -> int:
        """Number of outputs of the linear over all tensor ranks."""
        return self.outputs * (self.tensor if self.axis == 0 else 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A layer, or all that comes before or after the layers."""

    parameters: int
    linears: tuple[Linear, ...]

    @property
    def matrix_numbers(self) -> int:
        """Number of `parameters` that belong to the weight matrices of linears."""
        return sum(one.inputs * one.outputs for one in self.linears)

    @property
    def matrix_rows(self) -> int:
        """Number of rows (output channels) of all matrices, over all tensor ranks."""
        return sum(one.all_outputs for one in self.linears)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The parts of a network, as one tensor rank has them."""

    before: Part
    stacks: tuple[tuple[int, Part], ...]
    """For each stack of equal layers, (number of layers, one of them)."""
    after: Part

    def ends(self, *, pipeline: int = 1) -> int:
        """Number of weights outside the layers on the fullest of `pipeline` stages.

        The first stage has the weights before the layers, the last stage those after them.
        """
        both = [self.before.parameters, self.after.parameters]
        return sum(both) if pipeline == 1 else max(both)

    def parameters(self, *, pipeline: int = 1) -> int:
        """Number of weights on the fullest of `pipeline` stages.

        Each stage has equally many layers; if layers differ in size, the stage with the largest
        layers is meant.
        """
        runs = [(count, layer.parameters) for count, layer in self.stacks]
        held = -(-sum(count for count, _ in runs) // pipeline)
        return self.ends(pipeline=pipeline) + _fullest(runs, held)

    def layer_matrices(self) -> tuple[int, int]:
        """(elements, rows) of the matrices of a layer, averaged over the layers."""
        layers = sum(count for count, _ in self.stacks)
        numbers = sum(count * layer.matrix_numbers for count, layer in self.stacks)
        rows = sum(count * layer.matrix_rows for count, layer in self.stacks)
        return numbers // layers, rows // layers

    def adapter_numbers(self, rank: int, *, tensor: int = 1, pipeline: int = 1) -> int:
        """Number of parameters of LoRA adapters of `rank`, on one of `tensor` * `pipeline` ranks.

        Each linear of the layers that tensor ranks divide has an adapter: for each of its parts
        (such as query, key, value) a matrix A and a matrix B, one of which is divided over tensor
        ranks. The inventory must be that of `tensor` = 1.
        """
        total = 0
        for count, layer in self.stacks:
            split = [one for one in layer.linears if one.axis is not None]
            ends = sum(one.parts * one.inputs + one.outputs for one in split)
            total += count * (rank * ends * (tensor + 1) // (2 * tensor))
        return -(-total // pipeline)


def _fullest(runs: Iterable[tuple[int, int]], held: int) -> int:
    """Largest total size of `held` consecutive layers that begin at a multiple of `held`.

    `runs` are pairs (number of equal layers, size of one).
    """
    each = [number for count, number in runs for _ in range(count)]
    return max(sum(each[at : at + held]) for at in range(0, len(each), held))


@lru_cache(maxsize=4096)  # a plan asks for each layout and each number of recomputed layers
def alone(model: ModelConfig) -> ModelConfig:
    """The configuration of `model` on one rank, in bfloat16, without recomputation."""
    one: dict[str, Any] = {"name": CUSTOM_SIZE, "precision": Precision.BF16}
    # The keys beside the granularity too, or a network would be built for each of their values.
    one |= {"recompute_granularity": Recompute.NONE, "recompute_num_layers": 1}
    return replace(model.on_one_rank(), **one, recompute_method=RecomputeMethod.UNIFORM)


@lru_cache(maxsize=256)
def inventory(model: ModelConfig, *, tensor: int = 1) -> Inventory:
    """Weights and linears of a network on one of `tensor` ranks; `model` must come from `alone`.

    The network is built with as many pipeline stages as layers, but only one stage of each kind.
    """
    from dit.sizing.meta_network import stage_on_meta  # Megatron-Core takes 4 s to import

    model = replace(model, tensor_model_parallel_size=tensor)
    counts = [stack.count for stack in network_spec(model).stacks]
    layers, firsts = sum(counts), [0, *accumulate(counts)]
    kinds = {0, *firsts[:-1], layers - 1} - {layers}
    built = {at: stage_on_meta(model, stage=at, stages=layers) for at in kinds}
    last = built[layers - 1]
    stacks = []
    for first, count, name in zip(firsts, counts, built[0].stacks, strict=False):
        if count:
            (layer,) = built[first].stacks[name].layers
            stacks.append((count, _part(layer, [n for n, _ in layer.named_parameters()], tensor)))
    return Inventory(
        before=_part(built[0], _outside(built[0]), tensor),
        stacks=tuple(stacks),
        after=_part(last, _outside(last) if layers > 1 else [], tensor),
    )


def _outside(network: StackedTransformer) -> list[str]:
    """Names of the weights of `network` outside the layers."""
    inside = tuple(f"{name}." for name in network.stacks)
    return [name for name, _ in network.named_parameters() if not name.startswith(inside)]


def _part(module: nn.Module, names: Iterable[str], tensor: int) -> Part:
    """The weights of `module` that have these `names`, as a `Part`."""
    from dit.models.layers.adaptable import Adaptable

    names = [*names]
    owners = {name.rpartition(".")[0]: None for name in names if name.endswith(".weight")}
    linears = [module.get_submodule(name) for name in owners]
    return Part(
        sum(module.get_parameter(name).numel() for name in names),
        tuple(_linear(one, tensor) for one in linears if isinstance(one, Adaptable)),
    )


def _linear(module: Adaptable, tensor: int) -> Linear:
    outputs, inputs = module.get_parameter("weight").shape
    axis = module.tensor_sharing().axis
    return Linear(inputs=inputs, outputs=outputs, axis=axis, tensor=tensor, parts=module.parts)
