"""FLOPs of a forward pass, from the lengths of the samples in a pack.

`dit.sizing.flops` determines the coefficients once from a network. With them a worker of the loader
computes the cost of packs without the network.
"""

# n latent tokens, m text tokens, a tokens of sound of a sample

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from dit.config.sparsity import TokenRoute
from dit.models.layer_spec import NetworkSpec


@dataclass(frozen=True, slots=True)
class Multiplications:
    """Coefficients of a polynomial: multiplications of a forward pass over one sample.

    Its variables are the sample's n latent, m text and a sound tokens; `nm` is the factor of n m,
    for example, and `sample` the constant.
    """

    sample: int = 0
    n: int = 0
    m: int = 0
    nn: float = 0  # an integer unless queries see a share of the keys
    nm: int = 0
    mm: int = 0
    a: int = 0
    na: int = 0
    ma: int = 0
    aa: int = 0

    def __add__(self, other: Multiplications) -> Multiplications:
        return Multiplications(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> Multiplications:
        return Multiplications(*(count * one for one in astuple(self)))

    def of(self, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()) -> int:
        """Multiplications of a pass over samples, given the numbers of tokens of each.

        `tokens` (latents), `text` and `sound` have one entry per sample, in the same order; an
        empty `sound` stands for samples without sound.
        """
        total = self.sample * len(tokens) + self.n * sum(tokens) + self.m * sum(text)
        for n, m in zip(tokens, text, strict=True):
            total += round(self.nn * n * n) + self.nm * n * m + self.mm * m * m
        for n, m, a in zip(tokens, text, sound, strict=False):
            total += self.a * a + self.na * n * a + self.ma * m * a + self.aa * a * a
        return total


@dataclass(frozen=True, slots=True)
class PartWork:
    """Multiplications of a part of a network: of its linears, and of its attention."""

    linears: Multiplications = Multiplications()
    attention: Multiplications = Multiplications()

    def __add__(self, other: PartWork) -> PartWork:
        return PartWork(self.linears + other.linears, self.attention + other.attention)

    def times(self, count: int) -> PartWork:
        return PartWork(self.linears.times(count), self.attention.times(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassWork:
    """FLOPs of a forward pass of a network.

    The product of an m x k and a k x n matrix counts 2 m n k. Padding that no token attends to, and
    recomputation, do not count. Linears are proportional to tokens or samples, attention to pairs
    of tokens. Layers of a token route count only the tokens that they see.
    """

    spec: NetworkSpec
    whole: PartWork
    """Multiplications of everything that all tokens pass."""
    routed: PartWork
    """Multiplications of the layers inside `route`, for the tokens that pass them."""
    conditioner: PartWork
    """Multiplications of the network that captions pass before they are padded (Anima)."""
    route: TokenRoute | None

    def flops(self, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()) -> int:
        """FLOPs of a pass over samples, given the numbers of latent, caption and sound tokens.

        The three sequences have one entry per sample; an empty `sound` stands for samples without
        sound.
        """
        parts = [one.linears for one in (self.whole, self.routed, self.conditioner)]
        attention = self.attention_flops(tokens, text, sound)
        return self._flops(parts, tokens, text, sound) + attention

    def attention_flops(
        self, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()
    ) -> int:
        """FLOPs of attention alone, which `flops` includes; arguments are as in `flops`."""
        parts = [one.attention for one in (self.whole, self.routed, self.conditioner)]
        return self._flops(parts, tokens, text, sound)

    def _flops(
        self,
        parts: Sequence[Multiplications],
        tokens: Sequence[int],
        text: Sequence[int],
        sound: Sequence[int],
    ) -> int:
        whole, routed, conditioner = parts
        lengths, tokens = self.spec.text(text), self.spec.filled(tokens)
        kept = tokens if self.route is None else [self.route.tokens(one) for one in tokens]
        total = whole.of(tokens, lengths, sound) + routed.of(kept, lengths, sound)
        return 2 * (total + conditioner.of([0] * len(text), text))
