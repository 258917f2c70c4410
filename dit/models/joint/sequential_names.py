"""Diffusers' names of the tensors of layers with attention, then a SwiGLU, in one stream."""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# T width of the timestep embedding of modulations

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dit.models.diffusers.arrangements import Arrangement, GatesAndValues
from dit.models.diffusers.names import Row, TensorSplit, linear_rows, without_biases
from dit.models.joint.refined import RefinedConfig
from dit.models.joint.tensor_names import norm_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SequentialNames:
    """Diffusers' names of the modules of a layer, without the name of the layer."""

    norms: tuple[str, ...]
    """Names of norms: four (before and after attention, before and after the MLP), two (before
    attention and before the MLP), or none."""
    modulation: str | None
    """Name of the modulation's linear; None: the layer has no modulation."""
    attention: str
    mlp: tuple[str, str, str]
    """Names of the linears of the SwiGLU: gate, value, output."""
    gate: str | None = None
    """Name of the linear that gates the output of attention; None: there is no gate."""
    of_norms: str = "weight"
    """Our name of a norm's weight: `weight`, or `offset` if weight - 1 is stored."""


def weight_row(ours: str, theirs: str, width: str = "D", *, kind: str = "weight") -> Row:
    """The line of the name table for a norm's weight, which our network calls `kind`."""
    return Row(f"{ours}.{kind}", (f"{theirs}.weight",), TensorSplit.REPLICATED, (width,))


def refined_layers(stacks: Iterable[str]) -> Callable[[RefinedConfig], dict[str, int]]:
    """A function for `NameTable.layers`: it maps names of stacks to numbers of layers.

    `stacks` are the names of the refiners; the joint layers are the stack `blocks`.
    """

    def layers(model: RefinedConfig) -> dict[str, int]:
        return {stack: model.num_refiner_layers for stack in stacks} | {"blocks": model.num_layers}

    return layers


def sequential_rows(
    stack: str, theirs: str, names: SequentialNames, *, heads: Arrangement, rotated: bool = True
) -> tuple[Row, ...]:
    """Lines of the name table for the layers of our stack `stack`, in Diffusers `theirs`.

    `heads` arranges q, k and v in one matrix; `rotated` is as in `layer_rows`.
    """
    named = f"{stack}.layers.*", f"{theirs}.*", names
    return layer_rows(*named, heads=heads, rotated=rotated)


def layer_rows(
    ours: str,
    theirs: str,
    names: SequentialNames,
    *,
    heads: Arrangement,
    rotated: bool,
    hidden: str = "ffn_hidden_size",
) -> tuple[Row, ...]:
    """Lines of the name table for a layer in which only the modulation has a bias.

    Names of tensors begin with `ours`, in Diffusers with `theirs`. `heads` arranges q, k and v in
    one matrix. `rotated` says whether the numbers of a rotary pair are adjacent in Diffusers; in
    our network they are half a head apart. `hidden` is the field with the width of the MLP.
    """
    column = TensorSplit.COLUMN
    attention, own = f"{theirs}.{names.attention}", f"{ours}.attention"
    made = tuple(f"{attention}.to_{letter}" for letter in "qkv")
    made += () if names.gate is None else (f"{attention}.{names.gate}",)
    gates, values, last = (f"{theirs}.{name}" for name in names.mlp)
    modulation: tuple[Row, ...] = ()
    if names.modulation is not None:
        of_level = (f"{ours}.modulation.linear", f"{theirs}.{names.modulation}")
        modulation = linear_rows(*of_level, "4D", "T", split=column)
    of_heads: Any = {"split": column, "arrangement": heads}
    pairs: Any = {"split": column, "arrangement": GatesAndValues(hidden=hidden)}
    kind = names.of_norms
    ours_of_norms = ("norm_1", "after_1", "norm_2", "after_2")
    norms = zip(ours_of_norms[:: 4 // max(len(names.norms), 1)], names.norms, strict=False)
    out: Any = {"split": TensorSplit.ROW}
    return (
        *modulation,
        *(weight_row(f"{ours}.{mine}", f"{theirs}.{name}", kind=kind) for mine, name in norms),
        *norm_rows(own, attention, ("norm_q", "norm_k"), rotated=rotated, kind=kind),
        *without_biases(
            (
                *linear_rows(f"{own}.linear_qkv", made, "Q", "D", **of_heads),
                *linear_rows(f"{own}.linear_proj", f"{attention}.to_out.0", "D", "D", **out),
                *linear_rows(f"{ours}.mlp.linear_fc1", (gates, values), "2F", "D", **pairs),
                *linear_rows(f"{ours}.mlp.linear_fc2", last, "D", "F", **out),
            )
        ),
    )
