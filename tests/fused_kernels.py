"""What fused kernels and their plain forms make of the same tensors, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import (
    AcrossHeadsNorm,
    HeadNorm,
    fused_across_heads,
    fused_parts,
    rotate,
)

ROWS = {
    "equal": [0] * 20 + [1] * 20,
    "given frames": [3] * 5 + [0] * 9 + [4] * 2 + [1] * 30 + [5] * 3 + [2] * 1 + [5] * 2,
    "rows without tokens": [1] * 33 + [4] * 40,
    "one token": [2],
    "no token": [],
    "longer than a chunk": [0] * 32 + [1] * 80,
}
"""Level rows of the tokens of a pack, of `LEVEL_ROWS`."""
LEVEL_ROWS = 6
CALLS = ("modulate", "branch", "add", "add_and_branch")


@dataclass(frozen=True)
class AdaLNCall:
    """One call of `PerSample` with what it is given, and gradients for what it gives."""

    name: str
    level_row_T: Tensor
    inputs: dict[str, Tensor]
    to_out: tuple[Tensor, Tensor]
    rms: bool = False

    @classmethod
    def of(
        cls, name: str, rows: list[int], width: int, *, rms: bool = False, **kinds: Any
    ) -> AdaLNCall:
        """`kinds`: `tokens` and `levels`, their types, and the device."""
        rng, device = torch.Generator().manual_seed(len(rows)), kinds.get("device", "cpu")

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        tokens = [random(len(rows), width, dtype=kinds["tokens"]) for _ in range(4)]
        # Parts of wider rows, as a modulation makes them.
        levels = random(LEVEL_ROWS, 3 * width, dtype=kinds["levels"]).chunk(3, dim=-1)
        # A mean far from zero, as the tokens of deep layers have.
        inputs = {"h_TD": 3 + 2 * tokens[0]}
        inputs["h_TD"][-1:] = 1e-3 * tokens[0][-1:]  # the norm's epsilon counts
        if "add" in name:
            inputs |= {"x_TD": tokens[1], "gate_ND": levels[0]}
        if name != "add":
            inputs |= {"scale_ND": levels[1], "shift_ND": levels[2]}
        level_row_T = torch.tensor(rows, device=device).long()
        return cls(name, level_row_T, inputs, (tokens[2], tokens[3]), rms)

    def results(self, *, fused: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Outputs, then gradients of all inputs; `dtype` is that of a copy of the inputs."""
        per_sample = PerSample(self.level_row_T, None, fused=fused, rms=self.rms)
        inputs = {
            name: value.to(dtype or value.dtype).detach().requires_grad_()
            for name, value in self.inputs.items()
        }
        out = getattr(per_sample, self.name)(**inputs)
        outputs = (out,) if isinstance(out, Tensor) else out
        gradients = [x.to(dtype or x.dtype) for x in self.to_out[: len(outputs)]]
        return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), gradients)]


@dataclass(frozen=True)
class HeadsCall:
    """Queries and keys, with what lies beside them in the product."""

    x_THX: Tensor
    weights_K: tuple[Tensor, Tensor]
    angle_TK: Tensor
    others: tuple[int, ...]
    to_out: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        *,
        others: tuple[int, ...],
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> HeadsCall:
        """`shape`: tokens, heads and their width."""
        rng, (tokens, heads, width) = torch.Generator().manual_seed(1), shape

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        angle_TK = torch.rand(tokens, width // 2, generator=rng).repeat(1, 2) * 100
        # Gradients whose heads come first, as those of attention may.
        to_out = [random(heads, tokens, one).transpose(0, 1) for one in (width, width, *others)]
        x_THX = random(tokens, heads, 2 * width + sum(others))
        x_THX[-1:] *= 1e-3  # the norm's epsilon counts
        return cls(
            x_THX,
            (random(width), random(width)),
            angle_TK.to(device),
            others,
            tuple(to_out),
        )

    def results(self, *, fused: bool = False) -> list[Tensor]:
        """Queries, keys, the others; gradients of the product and of the weights."""
        width = len(self.weights_K[0])
        norms = [HeadNorm(width, dtype=w.dtype, eps=1e-6) for w in self.weights_K]
        for norm, weight in zip(norms, self.weights_K, strict=True):
            norm.weight = torch.nn.Parameter(weight.clone())
        x_THX = self.x_THX.detach().requires_grad_()
        angles = self.angle_TK.cos(), self.angle_TK.sin()
        widths = (width, width, *self.others)
        if fused:
            outputs = fused_parts(x_THX, widths, (norms[0], norms[1]), angles)
        else:
            q, k, *others = x_THX.split(widths, dim=-1)
            outputs = (rotate(norms[0](q), *angles), rotate(norms[1](k), *angles), *others)
        inputs = (x_THX, *(norm.weight for norm in norms))
        return [*outputs, *torch.autograd.grad(outputs, inputs, self.to_out)]

    def exact(self) -> list[Tensor]:
        """The same in float64, by complex numbers."""
        width = len(self.weights_K[0])
        x_THX, *weights = (x.double().requires_grad_() for x in (self.x_THX, *self.weights_K))
        q, k, *others = x_THX.split([width, width, *self.others], dim=-1)
        turn = torch.polar(torch.ones_like(a := self.angle_TK.double()), a)[:, None, : width // 2]
        outputs = []
        for x, weight in ((q, weights[0]), (k, weights[1])):
            n = weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            pairs = torch.complex(*n.chunk(2, dim=-1)) * turn
            outputs.append(torch.cat((pairs.real, pairs.imag), dim=-1))
        outputs += others
        gradients = [x.double() for x in self.to_out]
        return [*outputs, *torch.autograd.grad(outputs, (x_THX, *weights), gradients)]


class OneRank:
    """Stands for the group of one tensor rank."""

    def size(self) -> int:
        return 1


@dataclass(frozen=True)
class AcrossCall:
    """Queries, keys and values of self-attention in one row, or of cross-attention in several."""

    rows: tuple[Tensor, ...]  # [T, H, X]; one of 3 K; or of K, and of 2 K for text and an image
    scales: tuple[Tensor, ...]
    angles: tuple[Tensor, Tensor] | None
    twisted: bool
    to_out: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        lengths: tuple[int, ...],
        heads: tuple[int, int],
        *,
        dtype: torch.dtype,
        angles: str = "of tokens",
        device: str = "cpu",
    ) -> AcrossCall:
        """`heads`: their number and width; with one length there are `angles` of a kind.

        "of tokens", "of heads", either also "twisted": halves that are not alike.
        """
        rng, (number, width) = torch.Generator().manual_seed(2), heads

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        widths = [3] if len(lengths) == 1 else [1] + [2] * (len(lengths) - 1)
        xs = [random(t, number, n * width) for t, n in zip(lengths, widths, strict=True)]
        xs[0][-1:] *= 1e-3  # the norm's epsilon counts
        scales = [random(number * width) for _ in range(max(2, len(lengths)))]
        both = None
        if len(lengths) == 1:
            shape = (*lengths, number) if "heads" in angles else lengths
            angle = torch.rand(*shape, width, generator=rng).to(device) * 100
            if "twisted" not in angles:
                angle = angle[..., : width // 2].repeat(*[1] * len(shape), 2)
            both = angle.cos(), angle.sin()
        # Gradients whose heads come first, as those of attention may.
        to_out = [
            random(number, t, width).transpose(0, 1)
            for t, n in zip(lengths, widths, strict=True)
            for _ in range(n)
        ]
        return cls(tuple(xs), tuple(scales), both, "twisted" in angles, tuple(to_out))

    def norm(self, group: Any = None) -> AcrossHeadsNorm:
        """On one tensor rank, or on those of `group`."""
        group, part = group or OneRank(), len(self.scales[0])
        made = AcrossHeadsNorm(
            part * group.size(),
            eps=1e-6,
            dtype=self.scales[0].dtype,
            group=group,
            image=len(self.rows) == 3,
        ).to(self.rows[0].device)
        for mine, given in zip(made.parameters(), self.scales, strict=True):
            mine.data.copy_(given)
        return made

    def results(self, *, fused: bool = False, group: Any = None) -> list[Tensor]:
        """Queries, keys and values of each row; gradients of rows and of weights."""
        norm, width = self.norm(group), self.to_out[0].shape[-1]
        rows = [x.detach().requires_grad_() for x in self.rows]
        if fused:
            normed = 2 if len(rows) == 1 else 1
            given = [(x, normed, [width] * (x.shape[-1] // width - normed)) for x in rows]
            outputs = fused_across_heads(norm, given, self.angles, twisted=self.twisted)
        else:
            outputs = self._outputs(rows, norm, rotate)
        inputs = [*rows, *norm.parameters()]
        return [*outputs, *torch.autograd.grad(outputs, inputs, self.to_out)]

    def exact(self) -> list[Tensor]:
        """The same in float64 by autograd."""
        rows, scales = (
            [x.double().requires_grad_() for x in given] for given in (self.rows, self.scales)
        )

        def normed(*heads: Tensor) -> list[Tensor]:
            flat = [(x.flatten(1), w) for x, w in zip(heads, scales, strict=True)]
            made = [x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * w for x, w in flat]
            return [x.view_as(one) for x, one in zip(made, heads, strict=True)]

        def turned(x_THK: Tensor, *angles: Tensor) -> Tensor:
            rows = (x.double() if x.dim() == 3 else x.double()[:, None] for x in angles)
            cos, sin = (x.chunk(2, dim=-1) for x in rows)
            (low, high) = x_THK.chunk(2, dim=-1)
            turns = low * cos[0] - high * sin[0], high * cos[1] + low * sin[1]
            return torch.cat(turns, dim=-1)

        outputs = self._outputs(rows, normed, turned)
        gradients = [x.double() for x in self.to_out]
        return [*outputs, *torch.autograd.grad(outputs, [*rows, *scales], gradients)]

    def _outputs(self, rows: Sequence[Tensor], norm: Any, turn: Any) -> list[Tensor]:
        width = self.to_out[0].shape[-1]
        parts = [x.split(width, dim=-1) for x in rows]
        if len(rows) == 1:
            q, k, v = parts[0]
            return [*(turn(x, *(self.angles or ())) for x in norm(q, k)), v]
        heads = norm(*(cut[0] for cut in parts))
        return [x for mine, cut in zip(heads, parts, strict=True) for x in (mine, *cut[1:])]


def assert_exact(found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Compares float32 results with those in float64, each row (last axis) by its norm.

    An element alone may lose all its digits where its row cancels; what is lost of a row is some
    multiple of the rounding of float32, 6e-8, on any processor.
    """
    for mine, true in zip(found, exact, strict=True):
        assert mine.shape == true.shape
        lost = (mine.double() - true).norm(dim=-1)
        assert (lost <= 1e-5 * true.norm(dim=-1)).all(), lost.max()


def errors(
    fused: list[Tensor], plain: list[Tensor], exact: list[Tensor]
) -> Iterator[tuple[float, float, float]]:
    """Norms of the error of both forms and of the exact values, for each result."""
    for mine, other, true in zip(fused, plain, exact, strict=True):
        assert mine.dtype == other.dtype and mine.shape == true.shape
        assert torch.isfinite(mine).all()
        yield tuple(x.norm().item() for x in (mine - true, other - true, true))  # type: ignore[misc]
