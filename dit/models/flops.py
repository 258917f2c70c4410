"""Operations of a network, from the description of its layers."""

# n latent tokens, m text tokens of a sample

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dit.config import ModelConfig
from dit.models.cost import network_cost
from dit.models.layer_spec import Cost, Multiplications

if TYPE_CHECKING:
    from dit.batch import PackedBatch


def forward_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Operations of one forward pass over samples of `tokens` patches and `text` caption tokens.

    A product of matrices counts 2 m n k. Lengths are the true ones: padding of samples that no
    token attends to and recomputation count nothing. Linears go by tokens or samples, attention by
    pairs of tokens.
    Layers of a token route count the tokens that they see.
    """
    return _flops(model, attrgetter("multiplications"), tokens, text)


def attention_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Those of `forward_flops` that attention takes."""
    return _flops(model, attrgetter("in_attention"), tokens, text)


def _flops(
    model: ModelConfig,
    part: Callable[[Any], Multiplications],
    tokens: Sequence[int],
    text: Sequence[int],
) -> int:
    """Operations of a `part` of the multiplications of a network, or of some of its layers."""
    cost, lengths = network_cost(model), network_cost(model).text(text)
    tokens = cost.filled(tokens)
    total = part(cost).of(tokens, lengths)
    total += part(cost.conditioner).of([0] * len(text), text)
    if (route := model.token_route) is not None:
        layers, kept = part(_of_route(model)), [route.tokens(one) for one in tokens]
        total += layers.of(kept, lengths) - layers.of(tokens, lengths)
    return 2 * total


@lru_cache(maxsize=64)
def _of_route(model: ModelConfig) -> Cost:
    """The layers of the route."""
    route = model.token_route
    assert route is not None
    return network_cost(model).in_layers(route.first, route.last)


def pack_forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of one forward pass, from the true geometry of the pack.

    All layers see all tokens of a pack without a drawn route.
    """
    if batch.route_T is None and model.token_route is not None:
        model = model.with_all_tokens()
    return forward_flops(model, tokens=model.attended_in(batch), text=model.text_in(batch))


def training_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of both passes on a pack: the backward pass costs twice the forward one."""
    return 3 * pack_forward_flops(model, batch)
