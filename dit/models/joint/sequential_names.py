"""Diffusers' names of sequential layers: attention, then a SwiGLU, with norms around both."""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# T width of what modulations are made of

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
    """Diffusers' names of the modules of a layer, without the layer's own name."""

    norms: tuple[str, ...]
    """Names of the norms before and after attention, before and after the MLP; or of the two
    before; or none."""
    modulation: str | None
    """Name of the modulation's linear; None: the layer has no modulation."""
    attention: str
    mlp: tuple[str, str, str]
    """Names of the linears of the SwiGLU: gate, value, output."""
    gate: str | None = None
    """Name of the linear that gates the output of attention; None: there is no gate."""
    of_norms: str = "weight"
    """What we call the weight of a norm: `weight`, or `offset` if it is stored minus 1."""


def weight_row(ours: str, theirs: str, width: str = "D", *, kind: str = "weight") -> Row:
    """Name-table row of a norm's weight, which our network calls `kind`."""
    return Row(f"{ours}.{kind}", (f"{theirs}.weight",), TensorSplit.REPLICATED, (width,))


def refined_layers(stacks: Iterable[str]) -> Callable[[RefinedConfig], dict[str, int]]:
    """A function for `NameTable.layers`, which maps names of stacks to numbers of layers.

    `stacks` are the refiners' names; the joint layers are `blocks`.
    """

    def layers(model: RefinedConfig) -> dict[str, int]:
        return {stack: model.num_refiner_layers for stack in stacks} | {"blocks": model.num_layers}

    return layers


def sequential_rows(
    stack: str, theirs: str, names: SequentialNames, *, heads: Arrangement, rotated: bool = True
) -> tuple[Row, ...]:
    """Name-table rows of the layers of our `stack`, which Diffusers calls `theirs`.

    `heads` is the order of q, k and v in one matrix; `rotated` is as in `layer_rows`.
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
    """Name-table rows of a layer whose modulation alone has biases.

    `ours` and `theirs` begin the names of its tensors, `heads` is the order of q, k and v in one
    matrix. `rotated` says that rotary pairs are adjacent in Diffusers, not half a head apart.
    `hidden` is the field with the width of the MLP.
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
