"""Names in Diffusers of sequential layers: attention, then a SwiGLU, with norms around both."""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# T width of what modulations are made of

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dit.models.diffusers.arrangements import Arrangement, GatesAndValues
from dit.models.diffusers.names import Row, TensorSplit, linear_rows, without_biases
from dit.models.joint.tensor_names import norm_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SequentialNames:
    """What a layer of Diffusers calls its parts, behind the name of the layer."""

    norms: tuple[str, str, str, str]
    """Before and after attention, before and after the MLP."""
    modulation: str | None
    """None: the layer has none."""
    attention: str
    mlp: tuple[str, str, str]
    """Linears of gates, of values, and of their product."""


def weight_row(ours: str, theirs: str, width: str = "D") -> Row:
    """A weight of a norm."""
    return Row(f"{ours}.weight", (f"{theirs}.weight",), TensorSplit.REPLICATED, (width,))


def refined_layers(stacks: Iterable[str]) -> Callable[[Any], dict[str, int]]:
    """`NameTable.layers` of these stacks: refiners, and the layers over both rows."""

    def layers(model: Any) -> dict[str, int]:
        return {stack: model.num_refiner_layers for stack in stacks} | {"blocks": model.num_layers}

    return layers


def sequential_rows(
    stack: str, theirs: str, names: SequentialNames, *, heads: Arrangement
) -> tuple[Row, ...]:
    """Of the layers of one stack, which Diffusers calls `theirs`; only modulations have biases."""
    ours, theirs, column = f"{stack}.layers.*", f"{theirs}.*", TensorSplit.COLUMN
    attention, own = f"{theirs}.{names.attention}", f"{ours}.attention"
    made = tuple(f"{attention}.to_{letter}" for letter in "qkv")
    gates, values, last = (f"{theirs}.{name}" for name in names.mlp)
    modulation: tuple[Row, ...] = ()
    if names.modulation is not None:
        of_level = (f"{ours}.modulation.linear", f"{theirs}.{names.modulation}")
        modulation = linear_rows(*of_level, "4D", "T", split=column)
    of_heads: Any = {"split": column, "arrangement": heads}
    pairs: Any = {"split": column, "arrangement": GatesAndValues()}
    norms = zip(("norm_1", "after_1", "norm_2", "after_2"), names.norms, strict=True)
    out: Any = {"split": TensorSplit.ROW}
    return (
        *modulation,
        *(weight_row(f"{ours}.{mine}", f"{theirs}.{name}") for mine, name in norms),
        *norm_rows(own, attention, ("norm_q", "norm_k")),
        *without_biases(
            (
                *linear_rows(f"{own}.linear_qkv", made, "Q", "D", **of_heads),
                *linear_rows(f"{own}.linear_proj", f"{attention}.to_out.0", "D", "D", **out),
                *linear_rows(f"{ours}.mlp.linear_fc1", (gates, values), "2F", "D", **pairs),
                *linear_rows(f"{ours}.mlp.linear_fc2", last, "D", "F", **out),
            )
        ),
    )
