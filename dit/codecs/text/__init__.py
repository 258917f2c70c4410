"""Text encoders by name. To add one, subclass `TextEncoder` in a file of this folder.

anima               Anima, whose conditioner reads the states of Qwen3 by T5's tokens
encoder             the interface: caption -> embedding; the words of captions and of prompts
fixed_vectors       `bytes` and `words`: a fixed vector for each byte, or for each word
pretrained_encoder  text encoders on Transformers
flux2               those of FLUX.2, FLUX.3, Ideogram 4, which join the states of several layers
families            those of eight families
ltx2                those of LTX-2: Gemma's states, projected, before or after the connectors
longcat             those of LongCat-Image and of its edit model, which sees the picture
one_layer           those of Lumina Image 2.0, ERNIE-Image, Z-Image and OmniGen2
hidream             those of HiDream-I1: CLIP, T5, and all layers of Llama
hunyuan_video       those of the first HunyuanVideo; that of image-to-video sees the first frame
qwen_image          those of HunyuanImage, Krea 2, Qwen-Image and its 2.1; edit models see pictures
"""

from __future__ import annotations

import sys
from typing import Any

from dit.codecs.dataset_card import CodecError, part_of_card
from dit.codecs.dataset_encoder import Registry, classes_of
from dit.codecs.pretrained import ModelLocation
from dit.codecs.text.encoder import TextEncoder
from dit.codecs.text.fixed_vectors import ByteTable, WordTable

__all__ = ["TEXT_ENCODERS", "ByteTable", "TextEncoder", "WordTable"]

TEXT_ENCODERS = Registry(
    TextEncoder, classes_of(TextEncoder, sys.modules[__name__]), known="those known"
)
text_encoder_named = TEXT_ENCODERS.named


def text_encoder_of_card(
    card: dict[str, Any], location: ModelLocation | None = None
) -> TextEncoder:
    """The text encoder that a dataset card describes, to encode prompts.

    `location` says where its model is now; with None, it is where the card says.

    Raises:
        CodecError: the card names no known encoder, or one whose embeddings have changed since, or
            lacks a setting; or the encoder's model is missing.
    """
    encoder = TEXT_ENCODERS.of_card(card, location)
    revision = part_of_card(card, TextEncoder.card_part).get("revision")
    if revision != encoder.revision:
        raise CodecError(
            f"the dataset card asks for text encoder {encoder.name!r} revision"
            f" {revision!r}, but this version of data_prep has"
            f" {encoder.revision!r}; use the version that packed the data, or pack it again"
        )
    return encoder
