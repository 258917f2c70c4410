"""Anima's conditioner as a part of the network: what it costs, and what a sample holds for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dit.models.family import InputKind, SampleInput
from dit.models.layer_spec import Cost, RowKind, WeightShape, replicated
from dit.models.layer_spec.shapes import AttentionShape, Kept, KeptBy
from dit.token_ids import DIGITS, TOKEN_IDS

MOST_CONDITIONER_LAYERS = 64


def token_input(model: Any, *, encoder: str) -> SampleInput:
    """The tokens that the conditioner starts from, beside the states that they attend to."""
    return SampleInput(
        name=TOKEN_IDS,
        kind=InputKind.TEXT,
        width=DIGITS,
        vocabulary=model.conditioner_vocabulary,
        encoder=encoder,
    )


def conditioner_cost(model: Any) -> Cost:
    """Its arithmetic is that of Diffusers' `AnimaTextConditioner`.

    Captions count as if they had as many states as tokens.
    """
    width, made, read = model.conditioner_size, model.text_width, model.crossattn_emb_size
    rows: dict[str, Any] = {"rows": RowKind.TEXT}
    total = Cost(weights=(WeightShape(numbers=(model.conditioner_vocabulary + 1) * made),))
    if made != width:
        total += replicated(made, width, bias=True, **rows)
    attention = AttentionShape(width=width, queries=RowKind.TEXT, keys=RowKind.TEXT)
    inside = int(width * model.conditioner_mlp_ratio)
    for _ in range(model.conditioner_layers):
        for keys in (width, read):
            total += replicated(width, width, **rows) + replicated(width, width, **rows)
            total += replicated(keys, width, **rows) + replicated(keys, width, **rows)
        total += replicated(width, inside, bias=True, **rows)
        total += replicated(inside, width, bias=True, **rows)
        norms = WeightShape(numbers=3 * width + 4 * width // model.conditioner_heads)
        total += Cost(attentions=(attention, attention), weights=(norms,))
    total += replicated(width, made, bias=True, **rows)
    return replace(total, kept_of_text=_kept(model, inside=inside))


def _kept(model: Any, *, inside: int) -> KeptBy:
    """Of a layer what norms, attentions and MLP read and make, three rows of them of the states."""
    width, made = model.conditioner_size, model.text_width
    ends = model.crossattn_emb_size + width + made * (1 if made == width else 2)
    numbers = model.conditioner_layers * (18 * width + 2 * inside) + ends
    both = Kept(outside=numbers / model.hidden_size)
    return KeptBy(fused=both, eager=both)
