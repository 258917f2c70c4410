"""Text encoders by name. To add one: subclass `TextEncoder`, and name it in `TEXT_ENCODERS`."""

from __future__ import annotations

from typing import Any

from dit.codecs.dataset_card import part_of_card
from dit.codecs.errors import CodecError
from dit.codecs.pretrained import ModelLocation
from dit.codecs.text.byte_table import ByteTable
from dit.codecs.text.encoder import TextEncoder
from dit.codecs.text.families import CosmosText, FluxText, HunyuanText, WanText

_ALL = (ByteTable, FluxText, WanText, HunyuanText, CosmosText)
TEXT_ENCODERS: dict[str, type[TextEncoder]] = {encoder.name: encoder for encoder in _ALL}


def text_encoder_named(name: str) -> type[TextEncoder]:
    """The text encoder called `name`.

    Raises:
        CodecError: there is none; the message lists those there are.
    """
    if name not in TEXT_ENCODERS:
        known = ", ".join(TEXT_ENCODERS)
        raise CodecError(f"there is no text encoder {name!r}; those known: {known}")
    return TEXT_ENCODERS[name]


def text_encoder_of_card(card: dict[str, Any], place: ModelLocation | None = None) -> TextEncoder:
    """The text encoder of a dataset, for prompts.

    Raises:
        CodecError: the card names no known encoder, or one whose embeddings have changed since.
    """
    settings = part_of_card(card, "text_encoder")
    settings = settings | (place or ModelLocation()).settings(subfolder="text_encoder")
    try:
        encoder = text_encoder_named(str(settings.get("name"))).from_settings(settings)
    except KeyError as missing:
        raise CodecError(f"the dataset card lacks {missing} of its text encoder") from None
    if settings.get("revision") != encoder.revision:
        raise CodecError(
            f"the dataset card asks for text encoder {encoder.name!r} revision"
            f" {settings.get('revision')!r}, and this version of data_prep has"
            f" {encoder.revision!r}; use the version that packed the data, or pack it again"
        )
    return encoder


__all__ = [
    "TEXT_ENCODERS",
    "ByteTable",
    "TextEncoder",
    "text_encoder_named",
    "text_encoder_of_card",
]
