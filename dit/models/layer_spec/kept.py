"""What the backward pass needs of a layer of steps, by the kinds of its parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dit.models.layer_spec.parts import AttentionSpec, QkNorm, TableModulation
from dit.models.layer_spec.shapes import (
    AFFINE,
    BY_TABLE,
    CENTRED,
    CENTRED_HEADS,
    CROSS,
    CROSS_ACROSS_HEADS,
    EXCHANGED,
    EXCHANGED_ACROSS_HEADS,
    FLOAT32_ROWS,
    GROUPED,
    JOINT,
    JOINT_ACROSS_HEADS,
    JOINT_WITHOUT_NORM,
    MODULATED,
    NOT_AFTER,
    NOTHING,
    OF_CUBES,
    OF_IMAGE,
    OUTPUT_GATE,
    SECOND,
    SELF,
    SELF_ACROSS_HEADS,
    SEQUENTIAL,
    SINGLE,
    TWISTED,
    UNCHANGED,
    KeptBy,
    LayerNeeds,
    RowKind,
)
from dit.models.layer_spec.steps import (
    TEXT_TOKENS,
    Attend,
    AttendAndFeed,
    AttendTo,
    Feed,
    LayerSpec,
    NormKind,
    Port,
    ReferencesAlone,
)

_JOINT = {
    QkNorm.NONE: JOINT_WITHOUT_NORM,
    QkNorm.PER_HEAD: JOINT,
    QkNorm.ACROSS_HEADS: JOINT_ACROSS_HEADS,
}


@lru_cache(maxsize=256)  # a planner asks for it many times
def needs_of(layer: LayerSpec) -> LayerNeeds:
    """What the backward pass needs of the tokens of a layer."""
    first = next(layer.parts)
    if type(first) is AttendAndFeed:
        made = SINGLE + MODULATED + first.feed_forward.kept
        kept = LayerNeeds(kept=made, kept_of_text=made)
    elif isinstance(first, Attend) and first.joined is not None:
        kept = _of_two_rows(layer, first.attention)
    elif any(isinstance(part, AttendTo) for part in layer.parts):
        kept = _of_cross_attention(layer)
    else:
        kept = _of_one_row(layer)
    return kept


def _of_two_rows(layer: LayerSpec, attention: AttentionSpec) -> LayerNeeds:
    feeds = {
        part.port.row: part.feed_forward.kept for part in layer.parts if isinstance(part, Feed)
    }
    (own, *_), around = feeds.values(), _JOINT[attention.norm] + MODULATED + MODULATED
    more = SECOND if len(layer.groups[0]) > 1 else NOTHING
    text = feeds.get(TEXT_TOKENS, own)
    return LayerNeeds(kept=around + own + more, kept_of_text=around + text)


def _of_one_row(layer: LayerSpec) -> LayerNeeds:
    first: Any = next(layer.parts)
    parallel = isinstance(first, AttendAndFeed)
    mlp = first if parallel else next(part for part in layer.parts if isinstance(part, Feed))
    attention, port = first.attention, first.port
    kept = SEQUENTIAL if attention.key_heads == attention.heads else GROUPED
    more = (
        (NOT_AFTER, port.after is None),
        (TWISTED, attention.twisted),
        (CENTRED, port.norm is not None and port.norm.kind is NormKind.CENTRED),
        (CENTRED_HEADS, attention.centred),
        (OUTPUT_GATE, attention.output_gate),
        (FLOAT32_ROWS, port.slot and isinstance(port.slot.modulation.kind, TableModulation)),
    )
    kept = sum((one for one, holds in more if holds), kept)
    if port.norm is None:
        kept = (SELF_ACROSS_HEADS if _across(attention) else SELF) + MODULATED
        kept += NOTHING if parallel else MODULATED
    kept += mlp.feed_forward.kept
    idle = isinstance(layer.view, ReferencesAlone) and layer.view.idle
    return LayerNeeds(
        kept=NOTHING if idle or layer.over is RowKind.TEXT else kept,
        kept_of_text=kept if RowKind.TEXT in layer.over else NOTHING,
    )


def _of_cross_attention(layer: LayerSpec) -> LayerNeeds:
    total = LayerNeeds()
    for part in layer.parts:
        if isinstance(part, Attend):
            across, sparse = _across(part.attention), part.attention.sparse_pairs is not None
            total += LayerNeeds(
                kept=(SELF_ACROSS_HEADS if across else SELF) + (OF_CUBES if sparse else NOTHING),
                kept_exchanged=EXCHANGED_ACROSS_HEADS if across else EXCHANGED,
                cube_heads=part.attention.heads if sparse else 0,
            )
        elif isinstance(part, AttendTo):
            kept = CROSS_ACROSS_HEADS if _across(part.attention) else CROSS
            image = OF_IMAGE if len(part.keys) > 1 else NOTHING
            total += LayerNeeds(kept=kept + image, kept_of_text=kept)
        elif isinstance(part, Feed):
            total += LayerNeeds(kept=part.feed_forward.kept)
        if part.exchanges:
            total += LayerNeeds(kept=_around(part.port))
    return total


def _across(attention: AttentionSpec) -> bool:
    return attention.norm is QkNorm.ACROSS_HEADS


def _around(port: Port) -> KeptBy:
    """What norm, modulation and sum of a port keep."""
    if port.slot is not None:
        return BY_TABLE if isinstance(port.slot.modulation.kind, TableModulation) else MODULATED
    return AFFINE if port.norm is not None else UNCHANGED
