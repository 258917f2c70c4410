"""Which matrices of a network are linears, and which of them Muon or adapters use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from dit.config import LoraTargets, ModelConfig, OptimizerConfig, OptimizerKind, RunConfig
from dit.models.parameter_groups import frozen_weights, matched_weights
from dit.models.registry import pairs

if TYPE_CHECKING:
    from dit.models.diffusers.names import Pair

_WEIGHT = ".weight"
_NO_LINEARS = (".router.weight", "conditioner.embed.weight", "row_kind.weight")
"""Endings of names of matrices that are not linears in Diffusers, so they cannot have adapters."""
_CONDITIONER = "conditioner."
_FUSED = "*.linear_in*.to_qkv*"
_OURS = {
    LoraTargets.ATTENTION: ("*attention.*", "*_attn.*", "*.linear_in*.to_?", _FUSED),
    LoraTargets.MLP: ("*mlp.*", "*.linear_in*.proj_mlp", "*.linear_out*", _FUSED),
    LoraTargets.MODULATION: ("*modul*",),
}
"""For each word of `lora.targets`, patterns of "our name of a linear, Diffusers' name of it". In
single-stream layers one matrix may belong to both attention and MLP."""


def matrices_of_linears(model: ModelConfig) -> list[Pair]:
    """The matrices of all linears of the network of `model`, in the order of its name table.

    Raises:
        Problems: the network has no name table (see `registry.pairs`).
    """
    from dit.models.diffusers.arrangements import Convolution

    return [
        pair
        for pair in pairs(model)
        if pair.ours.endswith(_WEIGHT)
        and not pair.ours.endswith(_NO_LINEARS)
        and len(pair.shape) == 2
        and all(name.endswith(_WEIGHT) for name in pair.theirs)
        and not isinstance(pair.arrangement, Convolution)
    ]


def their_modules(pair: Pair) -> tuple[str, ...]:
    """Names of the modules of Diffusers that our linear `pair` fuses."""
    return tuple(name.removesuffix(_WEIGHT) for name in pair.theirs)


def is_in_layers(word: LoraTargets, module: str, pair: Pair) -> bool:
    """Whether the linear `module` belongs to attention, MLP or modulation (`word`) of a layer.

    `module` is one of `their_modules(pair)`.
    """
    both = f"{pair.ours} {module}"
    return pair.layer is not None and any(fnmatchcase(both, one) for one in _OURS[word])


@lru_cache(maxsize=8)  # the planner calls it for each layout
def _orthogonalised_shapes(
    model: ModelConfig, optimizer: OptimizerConfig
) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of each linear that Muon updates; `model` must be for a single rank."""
    return tuple(s for pair in _orthogonalised(model, optimizer) for s in linear_shapes(pair))


def linear_shapes(pair: Pair) -> list[tuple[int, int]]:
    """(outputs, inputs) of each linear that the matrix of `pair` fuses.

    Linears that are fused in Diffusers, too, are listed separately.
    """
    inputs = pair.shape[1]
    return [(rows, inputs) for each in pair.linears for rows in each]


def orthogonalised(model: ModelConfig, optimizer: OptimizerConfig) -> list[Pair]:
    """The matrices that Muon updates: linears of attention and feed-forward in the layers.

    Those that `optimizer.groups` freezes or assigns to AdamW are left out. The list is empty if
    `optimizer` is not Muon.

    Raises:
        Problems: the network has no name table, or `optimizer.groups` does not fit it.
    """
    return _orthogonalised(model, optimizer)


def _orthogonalised(model: ModelConfig, optimizer: OptimizerConfig) -> list[Pair]:
    if optimizer.kind is not OptimizerKind.MUON:
        return []
    left = {
        weight
        for weight, group in matched_weights(model, optimizer.groups).items()
        if group.frozen or group.kind is OptimizerKind.ADAMW
    }
    return [
        pair
        for pair in matrices_of_linears(model)
        if (pair.ours, pair.layer) not in left
        and any(_is_product_of_tokens(name, pair) for name in their_modules(pair))
    ]


def _is_product_of_tokens(module: str, pair: Pair) -> bool:
    """Whether the linear `module` belongs to attention or MLP of a layer.

    Its input then has a row per token, unlike that of a modulation.
    """
    of = {word: is_in_layers(word, module, pair) for word in LoraTargets}
    return not of[LoraTargets.MODULATION] and (of[LoraTargets.ATTENTION] or of[LoraTargets.MLP])


def is_target(target: str, module: str, pair: Pair) -> bool:
    """Whether `target`, an entry of `lora.targets`, matches the linear `module`.

    `module` is one of `their_modules(pair)`. A target is a word such as `attention`, a whole name,
    the end of a name, or a pattern (`fnmatch`).
    """
    if target in [*LoraTargets]:
        return is_in_layers(LoraTargets(target), module, pair)
    return module == target or module.endswith(f".{target}") or fnmatchcase(module, target)


def part_learns(config: RunConfig, part: str = _CONDITIONER) -> bool:
    """Whether a run trains weights whose names begin with `part`, or their adapters.

    With `lora.enabled`, it trains the adapters of the linears that `lora.targets` matches.

    Raises:
        Problems: the network has no name table, or `optimizer.groups` does not fit it.
    """
    model, lora = config.model, config.lora
    if not lora.enabled:
        frozen = frozen_weights(config).alone
        own = [pair for pair in pairs(model) if pair.ours.startswith(part)]
        return any((pair.ours, pair.layer) not in frozen for pair in own)
    own = [one for one in matrices_of_linears(model) if one.ours.startswith(part)]
    modules = [(name, pair) for pair in own for name in their_modules(pair)]
    return any(is_target(target, *one) for target in lora.targets for one in modules)


@dataclass(frozen=True, kw_only=True, slots=True)
class Orthogonalisation:
    """The linears that Muon updates, and the FLOPs of an update, over all ranks together."""

    matrices: int
    """Number of linears; linears that are fused in our network count separately."""
    numbers: int
    """Number of elements of these linears. Muon has one float32 state for each element, AdamW
    two."""
    numbers_here: int
    """Mean of `numbers` on a rank: divided by the numbers of tensor ranks and pipeline stages."""
    flops: int
    """FLOPs of the Newton-Schulz iterations in an update; the mean over `optimizer.muon_period`
    updates."""


def orthogonalisation(model: ModelConfig, optimizer: OptimizerConfig) -> Orthogonalisation:
    """The linears that Muon updates in `model` and the FLOPs of an update; zeros without Muon.

    A Newton-Schulz iteration on an m x n matrix, m <= n, takes 4 m^2 n + 2 m^3 FLOPs.

    Raises:
        Problems: the network has no name table, or `optimizer.groups` does not fit it.
    """
    shapes = _orthogonalised_shapes(model.on_one_rank(), optimizer)
    each = sum(4 * m * m * n + 2 * m**3 for m, n in map(sorted, shapes))
    numbers = sum(math.prod(shape) for shape in shapes)
    split = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    return Orthogonalisation(
        matrices=len(shapes),
        numbers=numbers,
        numbers_here=numbers // split,
        flops=optimizer.muon_steps * each // optimizer.muon_period,
    )


def orthogonalising_ranks(config: RunConfig, replicas: int) -> int:
    """The number of ranks that divide Muon's matrices among them.

    `replicas` is the number of data-parallel replicas. These ranks together have one copy of the
    optimizer's state.
    """
    model = config.model
    stages, tensor = model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    return stages * tensor * config.optimizer_ranks(replicas)
