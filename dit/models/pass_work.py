"""FLOPs of a forward pass, from the lengths of the samples in a pack.

`dit.sizing.flops` measures the coefficients once on a network. With them, the workers of the loader
compute the cost of packs without the network.
"""

# n latent tokens, m text tokens, a sound tokens of a sample

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from dit.config.sparsity import TokenRoute
from dit.models.layer_spec import NetworkSpec


@dataclass(frozen=True, slots=True)
class Multiplications:
    """Coefficients of a polynomial for the number of multiplications of a pass over one sample.

    Its variables are the sample's numbers of tokens: n latent, m text and a sound tokens. `nm`, for
    example, is the coefficient of n * m, and `sample` is the constant term.
    """

    sample: int = 0
    n: int = 0
    m: int = 0
    nn: float = 0  # an integer, unless queries attend to a fraction of keys (cubes)
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
        """The number of multiplications of a pass over several samples.

        `tokens`, `text` and `sound` are the numbers of latent, text and sound tokens of each
        sample; an empty `sound` stands for samples without sound.
        """
        total = self.sample * len(tokens) + self.n * sum(tokens) + self.m * sum(text)
        for n, m in zip(tokens, text, strict=True):
            total += round(self.nn * n * n) + self.nm * n * m + self.mm * m * m
        for n, m, a in zip(tokens, text, sound, strict=False):
            total += self.a * a + self.na * n * a + self.ma * m * a + self.aa * a * a
        return total


@dataclass(frozen=True, slots=True)
class PartWork:
    """Multiplications of a group of layers, separately for linears and for attention."""

    linears: Multiplications = Multiplications()
    attention: Multiplications = Multiplications()

    def __add__(self, other: PartWork) -> PartWork:
        return PartWork(self.linears + other.linears, self.attention + other.attention)

    def times(self, count: int) -> PartWork:
        return PartWork(self.linears.times(count), self.attention.times(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassWork:
    """The FLOPs of a network's forward pass, as a function of the lengths of samples.

    The product of an m x k and a k x n matrix counts as 2 m n k FLOPs. Padding to which no token
    attends, and recomputation, do not count. With token routing, the routed layers count only the
    tokens that they process.
    """

    spec: NetworkSpec
    whole: PartWork
    """Multiplications of everything but the routed layers and the conditioner."""
    routed: PartWork
    """Multiplications of the layers between the ends of `route`, which process fewer tokens."""
    conditioner: PartWork
    """Multiplications of the conditioner, which processes captions before padding (Anima)."""
    route: TokenRoute | None
    """Token routing of the run; None without it."""

    def flops(self, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()) -> int:
        """The FLOPs of a pass over several samples.

        `tokens`, `text` and `sound` are the numbers of latent, text and sound tokens of each
        sample; an empty `sound` stands for samples without sound.
        """
        parts = [one.linears for one in (self.whole, self.routed, self.conditioner)]
        attention = self.attention_flops(tokens, text, sound)
        return self._flops(parts, tokens, text, sound) + attention

    def attention_flops(
        self, tokens: Sequence[int], text: Sequence[int], sound: Sequence[int] = ()
    ) -> int:
        """The FLOPs of attention, which `flops` includes; arguments are those of `flops`."""
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
