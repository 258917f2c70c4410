"""Adds adapters from files (--lora) to the weights of a network that generates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dit.lora.factors import check_fits, shapes_of, summed
from dit.lora.files import read_lora
from dit.lora.targets import attach_adapters
from dit.models.layers.adaptable import FROZEN
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.train.checkpoint.adapters import draw_adapters

_MOST_SCALE = 1000


class ScaledFile(NamedTuple):
    """A file or folder of adapters, and the factor by which they are multiplied."""

    place: Path
    scale: float


def scaled_file(text: str, *, option: str) -> ScaledFile:
    """Splits FILE or FILE:SCALE into file and scale; without SCALE the scale is 1.

    A `text` that is an existing path is not split. Messages call the option `option`.

    Raises:
        ValueError: the scale is not a number, or beyond 1000.
    """
    place, _, scale = text.rpartition(":")
    if place and not Path(text).exists():
        if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", scale):
            if abs(float(scale)) > _MOST_SCALE:
                raise ValueError(
                    f"{option} {text}: the scale {scale} must lie in [-{_MOST_SCALE},"
                    f" {_MOST_SCALE}]; 1 is the strength of training"
                )
            return ScaledFile(Path(place), float(scale))
        if Path(place).exists():
            raise ValueError(
                f"{option} {text}: {scale!r} is not a number; write FILE:SCALE, such as {place}:0.8"
            )
    return ScaledFile(Path(text), 1.0)


def add_adapters(
    network: StackedTransformer,
    given: Sequence[str],
    *,
    option: str,
    without_text_encoder: Callable[[str], None] | None = None,
) -> None:
    """Adds the sum of the adapters in files to a loaded network, in place.

    `given` has texts FILE or FILE:SCALE, and messages call their option `option`. Adapters with
    scale 0 have no effect; adapters of the checkpoint itself stay. `without_text_encoder` is as in
    `read_lora`. All ranks must call this.

    Raises:
        ValueError: a file cannot be read, or belongs to another network.
    """
    files = [scaled_file(text, option=option) for text in given]
    read = []
    for file in files:
        factors = read_lora(file.place, network.model, without_text_encoder=without_text_encoder)
        check_fits(factors, network.model, place=f"{option} {file.place}")
        read.append(factors)
    used = [(one, f.scale) for one, f in zip(read, files, strict=True) if f.scale != 0]
    if adapters := summed(used):
        shapes, precision = shapes_of(adapters), network.model.precision
        attach_adapters(network, shapes, precision=precision, adapter=FROZEN)
        draw_adapters(network, adapters, adapter=FROZEN)
