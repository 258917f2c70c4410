"""The matrices of a network's linears, each with the names of the linears that it fuses."""

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
"""Endings of names of matrices that are no linears in Diffusers, so that they have no adapter."""
_CONDITIONER = "conditioner."
_FUSED = "*.linear_in*.to_qkv*"
_OURS = {
    LoraTargets.ATTENTION: ("*attention.*", "*_attn.*", "*.linear_in*.to_?", _FUSED),
    LoraTargets.MLP: ("*mlp.*", "*.linear_in*.proj_mlp", "*.linear_out*", _FUSED),
    LoraTargets.MODULATION: ("*modul*",),
}
"""For each word of `lora.targets`, patterns that match our name of a linear followed by Diffusers'.
In single-stream layers one matrix belongs to both attention and MLP."""


def matrices_of_linears(model: ModelConfig) -> list[Pair]:
    """The matrices of all linears of a network, in the order of its name table.

    Raises:
        Problems: as `pairs` of `registry`.
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
    """Names of Diffusers' modules that the linear `pair` of our network fuses."""
    return tuple(name.removesuffix(_WEIGHT) for name in pair.theirs)


def is_in_layers(word: LoraTargets, module: str, pair: Pair) -> bool:
    """Whether `module`, one of `their_modules(pair)`, is in the part of a layer called `word`."""
    both = f"{pair.ours} {module}"
    return pair.layer is not None and any(fnmatchcase(both, one) for one in _OURS[word])


@lru_cache(maxsize=8)  # a plan asks at each of its layouts
def _orthogonalised_shapes(
    model: ModelConfig, optimizer: OptimizerConfig
) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of each linear that Muon updates; `model` has a layout of one rank."""
    return tuple(s for pair in _orthogonalised(model, optimizer) for s in linear_shapes(pair))


def linear_shapes(pair: Pair) -> list[tuple[int, int]]:
    """(outputs, inputs) of each published linear that the matrix of `pair` fuses.

    Linears that Diffusers fuses, too, count separately.
    """
    inputs = pair.shape[1]
    return [(rows, inputs) for each in pair.linears for rows in each]


def orthogonalised(model: ModelConfig, optimizer: OptimizerConfig) -> list[Pair]:
    """The matrices that Muon updates: attention and feed-forward of the layers, unless frozen.

    `optimizer.groups` may leave some of them to AdamW. The list is empty if `optimizer` is not
    Muon.

    Raises:
        Problems: as `pairs` of `registry`, or as `group_of_weights` of `parameter_groups`.
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
    """Whether the linear's input has one row per token instead of one per sample."""
    of = {word: is_in_layers(word, module, pair) for word in LoraTargets}
    return not of[LoraTargets.MODULATION] and (of[LoraTargets.ATTENTION] or of[LoraTargets.MLP])


def is_target(target: str, module: str, pair: Pair) -> bool:
    """Whether the entry `target` of `lora.targets` matches `module`, one of `their_modules(pair)`.

    A target is a word, a whole name, the end of a name, or a pattern.
    """
    if target in [*LoraTargets]:
        return is_in_layers(LoraTargets(target), module, pair)
    return module == target or module.endswith(f".{target}") or fnmatchcase(module, target)


def part_learns(config: RunConfig, part: str = _CONDITIONER) -> bool:
    """Whether a run trains weights whose names begin with `part`, or adapters beside them.

    With `lora.enabled` it trains adapters beside those weights that an entry of `lora.targets`
    matches.

    Raises:
        Problems: as `group_of_weights`, or as `pairs` of `registry`.
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
    """Muon's work in an update, summed over all ranks."""

    matrices: int
    """Number of linears; those that our network fuses count separately."""
    numbers: int
    """Number of elements of these linears. Each has one float32 state in the optimizer instead of
    two."""
    numbers_here: int
    """`numbers` divided by the number of tensor ranks and pipeline stages: the mean per rank."""
    flops: int
    """FLOPs of the Newton-Schulz iterations in one update, as a mean over `optimizer.muon_period`
    updates."""


def orthogonalisation(model: ModelConfig, optimizer: OptimizerConfig) -> Orthogonalisation:
    """Muon's work in one update; zeros if `optimizer` is not Muon.

    An iteration on an m x n matrix, m <= n, takes 4 m^2 n + 2 m^3 FLOPs.

    Raises:
        Problems: as `orthogonalised`.
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
    """Number of ranks among which Muon's matrices are divided, with `replicas` replicas.

    These ranks together hold one copy of the optimizer's state.
    """
    model = config.model
    stages, tensor = model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    return stages * tensor * config.optimizer_ranks(replicas)
