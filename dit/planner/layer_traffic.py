"""Memory traffic of a layer on one device, besides its products and attention kernels.

A unit is the latent tokens of the device x width x 2 bytes: one read or one write of the hidden
state in bfloat16. `layer_units.json` has the units of each kind of layer, eager (operations of
torch) or fused (loads and stores of the kernels of `dit/models/kernels`), as
`benchmarks/count_traffic.py --table` counts them on one device; tests count them again.

The counts leave out the modulation after the last layer, tensors with a row for each sample, and
sums of biases that several tensor ranks compute outside their products.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dit.models.layer_spec import (
    Attend,
    AttendAndFeed,
    AttendTo,
    Feed,
    LayerSpec,
    QkNorm,
    RowKind,
)

KERNELS = {False: 190, True: 90}
"""Number of kernels that a layer launches in a forward and a backward pass, eager (False) or
fused (True): the 144 or 43 operations counted in DiT-XL, three for each of its 13 products, and
8 of attention."""
_BETWEEN = 0.5  # part of the units between matrices: norms, modulation and sums (0.4 to 0.6)


@dataclass(frozen=True, slots=True)
class Moved:
    """Units of traffic in the forward and in the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Moved:
        return Moved(self.forward * factor, self.backward * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """What determines a layer's memory traffic besides the layer's sizes."""

    fused: bool
    text: float
    """Number of text tokens per latent token."""
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    by_heads: bool = True
    """Whether context ranks exchange heads (a2a); if not, they gather keys and values."""


def layer_units(layer: LayerSpec, load: LayerLoad) -> Moved:
    """Units that one layer moves on one tensor rank in its forward and backward pass."""
    row, kernels = row_of(layer), "fused" if load.fused else "eager"
    own = _feed(layer)
    alone = _sees_text(layer)  # which does not pass the feed-forward
    rows = RowKind.JOINT if alone else layer.over
    latents, text = float(RowKind.LATENTS in rows), load.text * (RowKind.TEXT in rows)
    inside = 0 if alone else _feed(layer, last=True).hidden
    times = {
        "latents": latents,
        "text": text,
        "hidden": (own.hidden * latents + inside * text) / own.width,
    }
    columns = _table()[row][kernels]
    forward, backward = (
        sum(times[name] * units for name, units in columns[way].items())
        for way in ("forward", "backward")
    )
    # Without sequence parallelism, each tensor rank does all that is between matrices.
    whole = 0.0 if load.sequence_parallel else _BETWEEN
    units = Moved(forward, backward).times(whole + (1 - whole) / load.tensor)
    return units + _exchange(load).times(1 / load.tensor) if alone else units


def row_of(layer: LayerSpec) -> str:
    """Table row of the published network whose layer is most similar.

    Raises:
        ValueError: the layer has no feed-forward, or begins with another part than attention among
            its own tokens.
    """
    first: Any = next((part for part in layer.parts if part.exchanges), None)
    if not (isinstance(first, Attend | AttendAndFeed) and _feeds(layer)):
        kinds = ", ".join(type(part).__name__ for part in layer.parts)
        raise ValueError(
            f"the planner has no memory traffic for a layer of {kinds}: it knows layers with a"
            " feed-forward whose first part on tensor ranks is Attend or AttendAndFeed. Count it"
            " with benchmarks/count_traffic.py, and give row_of in dit/planner/layer_traffic.py a"
            " row for it"
        )
    # SwiGLU and its like multiply two hidden rows.
    gated = ", gated" if _feed(layer).feed_forward.activation.inputs > 1 else ""
    if isinstance(first, AttendAndFeed):
        return f"single{gated}" if type(first) is AttendAndFeed else f"parallel{gated}"
    if _sees_text(layer):
        return _cross_row(layer)
    if first.joined is None:
        return "sequential" if first.in_one_kernel else "sequential, grouped heads"
    if gated:
        return f"double{gated}"
    if len(layer.groups[0]) > 1:
        return "double, second attention"
    return "double, no norm" if first.attention.norm is QkNorm.NONE else "double"


def _cross_row(layer: LayerSpec) -> str:
    text = next(part for part in layer.parts if isinstance(part, AttendTo))
    if text.port.slot is None:
        return "cross, table"
    own = {type(part) for part in layer.parts} - {Attend, AttendTo, Feed}
    return "cross, learned positions" if own else "cross"


def _sees_text(layer: LayerSpec) -> bool:
    """Whether latents attend to text that the layer does not change."""
    return any(isinstance(part, AttendTo) for part in layer.parts)


def _feed(layer: LayerSpec, *, last: bool = False) -> Feed | AttendAndFeed:
    """The first part of `layer` that has a feed-forward, or with `last` the last one."""
    return _feeds(layer)[-1 if last else 0]


def _feeds(layer: LayerSpec) -> list[Feed | AttendAndFeed]:
    """Parts of `layer` that have a feed-forward."""
    return [part for part in layer.parts if isinstance(part, Feed | AttendAndFeed)]


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Units of traffic by table row, kind of kernels, pass, and quantity that scales them."""
    return json.loads((Path(__file__).parent / "layer_units.json").read_text())


def _exchange(load: LayerLoad) -> Moved:
    """Copies around the context-parallel exchange, in units, for layers with one row of tokens.

    By heads: queries, keys and values are arranged by rank (6 units), and the output (2). By
    all-gather: keys and values are joined (4), and those of all ranks put in order (4 each). The
    backward pass does the same, except for the join, and first joins the gradients.
    """
    if load.context == 1:
        return Moved()
    if load.by_heads:
        return Moved(6 + 2, 2 + 6 + 6)
    return Moved(4 + 4 * load.context, (4 + 4) * load.context)
