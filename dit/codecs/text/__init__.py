"""Text encoders by name. To add one: subclass `TextEncoder`, and name it in `TEXT_ENCODERS`.

anima               Anima, whose conditioner reads the states of Qwen3 by T5's tokens
chats               Z-Image and OmniGen2, whose captions are a chat
encoder             the interface: caption -> embedding; the words of captions and of prompts
fixed_vectors       `bytes` and `words`: a fixed vector for each byte, or for each word
pretrained_encoder  text encoders on Transformers
flux2               FLUX.2, FLUX.3 and Ideogram 4, which join the states of several layers
families            eight further families, in the table `OF_FAMILIES`
longcat             LongCat-Image and its edit model, which sees the picture
lumina2             Lumina Image 2.0 and ERNIE-Image, which read the layer before the last
hidream             HiDream-I1: CLIP, T5, and all layers of Llama
hunyuan_video       the first HunyuanVideo; its image-to-video encoder sees the first frame
qwen_image          HunyuanImage, Krea 2, Qwen-Image and its 2.1; edit models see pictures
"""

from __future__ import annotations

from typing import Any

from dit.codecs.dataset_card import CodecError, part_of_card
from dit.codecs.dataset_encoder import Registry
from dit.codecs.pretrained import ModelLocation
from dit.codecs.text.anima import AnimaStates, AnimaText
from dit.codecs.text.chats import OmniGen2Text, ZImageText
from dit.codecs.text.encoder import TextEncoder
from dit.codecs.text.families import OF_FAMILIES
from dit.codecs.text.fixed_vectors import ByteTable, WordTable
from dit.codecs.text.flux2 import Flux2KleinText, Flux2Text, Flux3KleinText, Ideogram4Text
from dit.codecs.text.hidream import HiDreamText
from dit.codecs.text.hunyuan_video import HunyuanVideoImageText, HunyuanVideoText
from dit.codecs.text.longcat import LongCatEditText, LongCatText
from dit.codecs.text.lumina2 import ErnieImageText, Lumina2Text
from dit.codecs.text.qwen_image import (
    HunyuanImageText,
    Krea2Text,
    QwenImage21Text,
    QwenImageEditPlusText,
    QwenImageEditText,
    QwenImageText,
)

TEXT_ENCODERS = Registry(
    TextEncoder,
    (
        *(WordTable, ByteTable, *OF_FAMILIES),
        *(QwenImageText, QwenImageEditText, QwenImageEditPlusText, HunyuanImageText),
        *(HunyuanVideoText, HunyuanVideoImageText, Flux2Text, Flux2KleinText),
        *(Lumina2Text, LongCatText, LongCatEditText, ZImageText, AnimaText),
        *(AnimaStates, HiDreamText, OmniGen2Text),
        ErnieImageText,
        Krea2Text,
        Flux3KleinText,
        Ideogram4Text,
        QwenImage21Text,
    ),
    known="those known",
)
text_encoder_named = TEXT_ENCODERS.named


def text_encoder_of_card(
    card: dict[str, Any], location: ModelLocation | None = None
) -> TextEncoder:
    """The text encoder of a dataset, for prompts.

    Raises:
        CodecError: the card names no known encoder, or one whose embeddings have changed since
            then.
    """
    encoder = TEXT_ENCODERS.of_card(card, location)
    revision = part_of_card(card, TextEncoder.card_part).get("revision")
    if revision != encoder.revision:
        raise CodecError(
            f"the dataset card asks for text encoder {encoder.name!r} revision"
            f" {revision!r}, and this version of data_prep has"
            f" {encoder.revision!r}; use the version that packed the data, or pack it again"
        )
    return encoder
