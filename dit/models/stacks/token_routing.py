"""Token routing (TREAD): in training, some layers process only some tokens; others skip them.

The routed layers get a pack with only the kept tokens (`PackedBatch.partial`), from which the
network computes conditions and attention as from any other pack. The tokens are divided into runs
of adjacent tokens, and an equal number is kept in each run. So every rank keeps the same fraction
of its tokens, and ranks need not communicate.
"""

# T tokens, D model width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dit.batch import PackedBatch, Route
from dit.config.sparsity import TokenRoute
from dit.models.layers.adaptable import DropoutRows
from dit.models.layers.context_parallel import TokenOrder

WAITING = "waiting"
"""Name, among hidden states, of the tokens that skip the routed layers."""


def kept_pack(batch: PackedBatch, route: TokenRoute) -> PackedBatch:
    """A pack of the tokens that the layers of `route` process.

    `batch` is a whole pack or a rank's shard of it.
    """
    draw = batch.method(Route)
    assert draw is not None
    rows_T = _in_runs(draw.move_T, route)[:, : route.kept].flatten()
    return batch.partial(
        rows_T,
        starts=tuple(route.rows(start) for start in batch.starts),
        kept_tokens=tuple(route.tokens(real) for real in batch.num_tokens),
    )


def _in_runs(move_T: Tensor, route: TokenRoute) -> Tensor:
    """The indices of tokens, [runs, tokens of a run], with the kept tokens of each run first."""
    order_T = torch.arange(len(move_T), device=move_T.device) + move_T
    return order_T.view(-1, route.run)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedTokens:
    """Separates this rank's tokens into those that the routed layers process, and the others."""

    route: TokenRoute
    order: TokenOrder  # between the order of the pack and the order of `_in_runs`

    @classmethod
    def of(
        cls, batch: PackedBatch, route: TokenRoute, *, my_tokens: Callable[[Tensor], Tensor]
    ) -> RoutedTokens:
        draw = batch.method(Route)
        assert draw is not None
        order_T = _in_runs(my_tokens(draw.move_T), route).flatten()
        back_T = torch.empty_like(order_T)
        back_T[order_T] = torch.arange(len(order_T), device=order_T.device)
        return cls(route=route, order=TokenOrder(order_T, back_T))

    def apart(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens of `x_TD` that the routed layers process, tokens that skip these layers)."""
        runs = self.order.arrange(x_TD).unflatten(0, (-1, self.route.run))
        kept, others = runs.tensor_split((self.route.kept,), dim=1)
        return kept.flatten(0, 1), others.flatten(0, 1)

    def together(self, kept_TD: Tensor, others_TD: Tensor) -> Tensor:
        """All tokens [T, D] in the order of the pack: the inverse of `apart`."""
        runs = len(kept_TD) // self.route.kept
        parts = (x.unflatten(0, (runs, -1)) for x in (kept_TD, others_TD))
        return self.order.restore(torch.cat([*parts], dim=1).flatten(0, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedPass:
    """The inputs of the routed layers in one pass, which differ from those of other layers."""

    tokens: RoutedTokens
    conditions: Any
    dropout: DropoutRows | None
