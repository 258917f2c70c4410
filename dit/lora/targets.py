"""Chooses the linears that get adapters, by Diffusers' names of modules, and adds the adapters.

1. chosen_adapters  the linears that `lora.targets` matches, with rank and alpha
2. attach_adapters  adds adapters to a network and freezes its other weights
3. share_base       lets two networks with different adapters share one base in memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from dit.config import LoraConfig, LoraStreams, LoraTargets, ModelConfig, Precision, Problems
from dit.lora.adapter import Adapter, AdapterShape, OutputParts, freeze
from dit.models.diffusers.names import Pair
from dit.models.layers.adaptable import CHILD, Adaptable, is_adapter
from dit.models.linears import is_target, matrices_of_linears, their_modules
from dit.models.registry import family_of
from dit.models.stacks.stacked_transformer import StackedTransformer

Adapters = Mapping[str, AdapterShape]
"""Module name in Diffusers' network -> rank and alpha of its adapter."""
_WEIGHT = ".weight"
_WORDS = [*LoraTargets]


def linear_name(pair: Pair) -> str:
    """Name of the linear of `pair` in this project's network, with the number of its layer."""
    name = pair.ours.removesuffix(_WEIGHT)
    return name if pair.layer is None else name.replace("layers.", f"layers.{pair.layer}.", 1)


def stored_name(pair: Pair, part: int, letter: str, *, adapter: str = CHILD) -> str:
    """Name in checkpoints of A or B (`letter`) for part number `part` of the linear of `pair`.

    `adapter` is the name of the module that holds the adapters.
    """
    layer = "" if pair.layer is None else f"{pair.layer}."
    return f"{pair.ours.removesuffix(_WEIGHT)}.{adapter}.{layer}{part}.{letter}"


def chosen_adapters(model: ModelConfig, lora: LoraConfig) -> dict[str, AdapterShape]:
    """Rank and alpha of each adapter that `lora.targets` selects, by Diffusers' module.

    Raises:
        Problems: a target matches no linear, or `lora.streams` leaves out all of its linears.
    """
    assert lora.rank is not None
    shape = AdapterShape(rank=lora.rank, alpha=lora.alpha or lora.rank)
    every = {name: pair for pair in matrices_of_linears(model) for name in their_modules(pair)}
    found: dict[str, AdapterShape] = {}
    for target in lora.targets:
        names = [name for name, pair in every.items() if is_target(target, name, pair)]
        if not names:
            raise Problems([_nothing_matches(target, list(every))])
        if not (kept := [name for name in names if _is_of(lora.streams, every[name])]):
            raise Problems(
                [
                    f"lora.targets={target}: all of its linears are left out by lora.streams="
                    f"{lora.streams}; leave the target out, or set lora.streams=both"
                ]
            )
        found |= dict.fromkeys(kept, shape)
    return {name: found[name] for name in every if name in found}


def _is_of(streams: LoraStreams, pair: Pair) -> bool:
    """Whether a linear belongs to the chosen streams of a network with a sound."""
    own = family_of(pair.model).weights.stream(pair.ours)
    return streams is LoraStreams.BOTH or own is streams


def _nothing_matches(target: str, names: list[str]) -> str:
    if target in _WORDS:
        return (
            f"lora.targets={target}: the layers of this network have no such linears; leave this"
            " target out"
        )
    ends = {name.rpartition(".")[2] for name in names} - {"0", "2"}
    near = get_close_matches(target, [*_WORDS, *names, *ends], n=4, cutoff=0.4)
    near = near or get_close_matches(target.strip("*."), list(ends), n=4, cutoff=0.0)
    return (
        f"lora.targets={target}: no linear of the network has such a name; use a name such as"
        f" {', '.join(near)}"
    )


def adapters_by_linear(
    model: ModelConfig, adapters: Adapters
) -> dict[str, tuple[Pair, list[AdapterShape | None]]]:
    """Name of each adapted linear -> (its entry in the name table, rank and alpha for each part).

    A part without adapter has None.

    Raises:
        Problems: an adapter belongs to a module that the network lacks, or that is not a linear.
    """
    every = {linear_name(pair): pair for pair in matrices_of_linears(model)}
    known = {name for pair in every.values() for name in their_modules(pair)}
    if unknown := [name for name in adapters if name not in known]:
        near = get_close_matches(unknown[0], known, n=2)
        raise Problems(
            [
                f"the adapters of {', '.join(unknown[:3])} ({len(unknown)} in all) belong to no"
                " linear of this network; give adapters of this network. Near names of linears:"
                f" {', '.join(near)}"
            ]
        )
    shapes = {
        name: [adapters.get(their) for their in their_modules(pair)] for name, pair in every.items()
    }
    return {name: (every[name], own) for name, own in shapes.items() if any(own)}


def attach_adapters(
    network: StackedTransformer,
    adapters: Adapters,
    *,
    precision: Precision,
    dropout: float = 0.0,
    adapter: str = CHILD,
) -> None:
    """Adds adapters to the linears of `network`, and freezes all weights but trained adapters.

    `network` is one pipeline stage, which gets the rate `dropout` as `adapter_dropout` if it is not
    0. `precision` determines the dtype of the adapters. Their name `adapter` decides whether they
    are trained (`dit.models.layers.adaptable`).
    """
    here = _linears(network)
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    made = {"dtype": dtype, "dropout": dropout}
    for name, (pair, shapes) in adapters_by_linear(network.model, adapters).items():
        if (linear := here.get(name)) is not None:
            parts = [rows for rows, *_ in pair.their_shapes.values()]
            shared = network.groups.tp.size() if pair.groups > 1 else 1
            outputs = OutputParts(parts=parts, groups=pair.groups // shared)
            sharing = linear.tensor_sharing()
            place = name if adapter == CHILD else f"{name}.{adapter}"
            at = {"name": place, "outputs": outputs, "sharing": sharing}
            linear.add_adapter(adapter, Adapter(linear.weight, shapes, **at, **made))  # type: ignore[arg-type]
    if dropout:
        network.adapter_dropout = dropout
    freeze(network)


def share_base(modules: Sequence[Any], base: Sequence[Any]) -> None:
    """Replaces all weights of `modules` but adapters by those of `base`, so that both share memory.

    `base` are networks with the same weights by name. Adapters get memory of their own,
    uninitialised, on the device of the base.
    """
    for module, owner in zip(modules, base, strict=True):
        of_base = dict(owner.named_modules())
        for name, own in module.named_modules():
            _share(own, of_base[name], prefix=f"{name}.")


def _share(own: nn.Module, other: nn.Module, *, prefix: str) -> None:
    if isinstance(own, Adaptable):
        own.frozen = other.frozen
    for name, weight in [*own.named_parameters(recurse=False)]:
        if is_adapter(f".{prefix}{name}"):
            made = nn.Parameter(torch.empty_like(weight, device=_device(other)))
            vars(made).update(vars(weight))
            setattr(own, name, made)
        else:
            setattr(own, name, getattr(other, name))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _linears(network: nn.Module) -> dict[str, Adaptable]:
    """Linears of a pipeline stage, by names in the whole network; layers count from 0."""
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, Adaptable):
            stack, middle, rest = name.partition(".layers.")
            if middle:
                local, _, rest = rest.partition(".")
                layer: Any = network.get_submodule(f"{stack}.layers.{local}")
                name = f"{stack}.layers.{layer.layer_number - 1}.{rest}"
            found[name] = module
    return found
