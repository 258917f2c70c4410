"""Operations of a network in training, from the description of its layers.

A pass of validation or generation, whose layers see all tokens, has those of the same network
without a token route.
"""

# n latent tokens, m text tokens of a sample

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dit.config import ModelConfig
from dit.models.cost import network_cost
from dit.models.layer_spec import Multiplications

if TYPE_CHECKING:
    from dit.batch import PackedBatch


def forward_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Operations of one forward pass over samples of `tokens` patches and `text` caption tokens.

    A product of matrices counts 2 m n k. Lengths are the true ones: padding of samples and
    recomputation count nothing. Linears go by tokens or samples, attention by pairs of tokens.
    Layers of a token route count the tokens that they see.
    """
    cost, lengths = network_cost(model), network_cost(model).text(text)
    total = cost.multiplications.of(tokens, lengths)
    if (route := model.token_route) is not None:
        layers, kept = _of_route(model)[0], [route.tokens(one) for one in tokens]
        total += layers.of(kept, lengths) - layers.of(tokens, lengths)
    return 2 * total


def attention_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Those of `forward_flops` that attention takes."""
    cost, lengths = network_cost(model), network_cost(model).text(text)
    total = cost.in_attention.of(tokens, lengths)
    if (route := model.token_route) is not None:
        layers, kept = _of_route(model)[1], [route.tokens(one) for one in tokens]
        total += layers.of(kept, lengths) - layers.of(tokens, lengths)
    return 2 * total


@lru_cache(maxsize=64)
def _of_route(model: ModelConfig) -> tuple[Multiplications, Multiplications]:
    """All multiplications of the layers of the route, and those of attention among them."""
    route = model.token_route
    assert route is not None
    layers = network_cost(model).in_layers(route.first, route.last)
    return layers.multiplications, layers.in_attention


def pack_forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of one forward pass, from the true geometry of the pack."""
    return forward_flops(model, tokens=batch.num_tokens, text=batch.text_rows)


def training_flops(model: ModelConfig, batch: PackedBatch, *, passes: int = 0) -> int:
    """Operations of a training step on a pack: the backward pass costs twice the forward one.

    `passes` are those without gradients before it, whose layers see all tokens.
    """
    before = passes * pack_forward_flops(model.with_all_tokens(), batch)
    return 3 * pack_forward_flops(model, batch) + before
