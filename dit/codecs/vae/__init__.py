"""Codecs by name. To add one: subclass `Codec`, and name the class in `PROCESSORS`."""

from __future__ import annotations

from typing import Any

from dit.codecs.dataset_card import part_of_card
from dit.codecs.errors import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import ModelLocation
from dit.codecs.vae.codec import Codec
from dit.codecs.vae.families import Cosmos, Flux, Hunyuan, Wan
from dit.codecs.vae.pixel import Pixel

_ALL = (Pixel, Flux, Wan, Hunyuan, Cosmos)
PROCESSORS: dict[str, type[Codec]] = {processor.name: processor for processor in _ALL}


def codec_named(name: str) -> type[Codec]:
    """The processor called `name`.

    Raises:
        CodecError: there is none; the message lists those there are.
    """
    if name not in PROCESSORS:
        known = ", ".join(PROCESSORS)
        raise CodecError(
            f"there is no processor {name!r}; --list_processors shows those known: {known}"
        )
    return PROCESSORS[name]


def codec_of_card(card: dict[str, Any], place: ModelLocation | None = None) -> Codec:
    """The processor that made a dataset, whose `decode` turns its latents back into pictures.

    Raises:
        CodecError: the card names no known processor, lacks a setting, or its model is not there.
    """
    settings, latent = part_of_card(card, "processor"), part_of_card(card, "latent")
    settings = settings | (place or ModelLocation()).settings(subfolder="vae")
    processor = codec_named(str(settings.get("name")))
    try:
        whitening = Whitening(mean=tuple(latent["mean"]), std=tuple(latent["std"]))
        rebuilt = processor.from_settings(settings, whitening)
    except KeyError as missing:
        raise CodecError(
            f"the dataset card lacks {missing} of processor {processor.name!r}; pack the data again"
        ) from None
    channels = rebuilt.channels
    if len(whitening.mean) != len(whitening.std) or len(whitening.mean) % channels:
        raise CodecError(
            f"the dataset card has {len(whitening.mean)} means and {len(whitening.std)} deviations"
            f" for the {rebuilt.channels} channels of {processor.name!r}; pack the data again"
        )
    return rebuilt


__all__ = ["PROCESSORS", "Codec", "ModelLocation", "Pixel", "codec_named", "codec_of_card"]
