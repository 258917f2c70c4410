"""A, B and alpha of one adapted linear, and whether adapters fit a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor

from dit.config import ModelConfig
from dit.lora.targets import adaptable_pairs, their_modules


class LoraFileError(ValueError):
    """A file of adapters cannot be used; the message names the file and the key, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFactors:
    """LoRA (arXiv:2106.09685) of one linear: y = W x + alpha / r * up (down x)."""

    down: Tensor  # A, [r, inputs], float32
    up: Tensor  # B, [outputs, r], float32
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def folded(self) -> LoraFactors:
        """The same adapter with alpha = r."""
        return LoraFactors(down=self.down, up=self.scale * self.up, alpha=float(self.rank))

    def product(self) -> Tensor:
        """What is added to the weight, [outputs, inputs]."""
        return self.scale * (self.up @ self.down)


def in_order(factors: Mapping[str, LoraFactors]) -> dict[str, LoraFactors]:
    """By name, with blocks.2 before blocks.10."""

    def place(item: tuple[str, LoraFactors]) -> list[tuple[int, int, str]]:
        parts = item[0].split(".")
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]

    return dict(sorted(factors.items(), key=place))


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Module of Diffusers' network -> (outputs, inputs) of each linear that can have an adapter.

    Raises:
        Problems: Diffusers has no such network.
    """
    return {
        module: (shape[0], shape[1])
        for pair in adaptable_pairs(model)
        for module, shape in zip(their_modules(pair), pair.their_shapes.values(), strict=True)
    }


def check_fits(factors: Mapping[str, LoraFactors], model: ModelConfig, *, place: object) -> None:
    """Checks that each adapter belongs to a linear of the network, in its shape.

    Raises:
        LoraFileError: names what does not fit, with the nearest names.
        Problems: Diffusers has no such network.
    """
    shapes = linear_shapes(model)
    wrong = [_unknown(name, shapes) for name in factors if name not in shapes]
    wrong += [
        f"{name} is of a linear with {_size(one)}, and the network's has"
        f" {shapes[name][1]} inputs and {shapes[name][0]} outputs"
        for name, one in factors.items()
        if name in shapes and shapes[name] != (one.up.shape[0], one.down.shape[1])
    ]
    if wrong:
        more = f"; and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise LoraFileError(
            f"{place} is of another network than model.family={model.family}"
            f" model.name={model.name}: {'; '.join(wrong[:_MOST])}{more}"
        )


_MOST = 5  # shown in one message


def _unknown(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=2, cutoff=0.6)
    nearest = f" (the nearest are {', '.join(near)})" if near else ""
    return f"the network has no linear {name}{nearest}"


def _size(one: LoraFactors) -> str:
    return f"{one.down.shape[1]} inputs and {one.up.shape[0]} outputs"
