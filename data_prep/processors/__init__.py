"""Codecs by name. To add one: subclass `Processor`, and name the class in `PROCESSORS`."""

from __future__ import annotations

from typing import Any

from data_prep.cards import part_of_card
from data_prep.processors.families import Cosmos, Flux, Hunyuan, Wan
from data_prep.processors.pixel import Pixel
from data_prep.processors.processor import Processor
from data_prep.refusals import PrepError
from data_prep.weights import Place
from data_prep.whitening import Whitening

_ALL = (Pixel, Flux, Wan, Hunyuan, Cosmos)
PROCESSORS: dict[str, type[Processor]] = {processor.name: processor for processor in _ALL}


def named(name: str) -> type[Processor]:
    """The processor called `name`.

    Raises:
        PrepError: there is none; the message lists those there are.
    """
    if name not in PROCESSORS:
        known = ", ".join(PROCESSORS)
        raise PrepError(
            f"there is no processor {name!r}; --list_processors shows those known: {known}"
        )
    return PROCESSORS[name]


def from_card(card: dict[str, Any], place: Place | None = None) -> Processor:
    """The processor that made a dataset, whose `decode` turns its latents back into pictures.

    Raises:
        PrepError: the card names no known processor, or lacks a setting, or its model is not there.
    """
    settings, latent = part_of_card(card, "processor"), part_of_card(card, "latent")
    settings = settings | (place or Place()).settings(subfolder="vae")
    processor = named(str(settings.get("name")))
    try:
        whitening = Whitening(mean=tuple(latent["mean"]), std=tuple(latent["std"]))
        rebuilt = processor.from_settings(settings, whitening)
    except KeyError as missing:
        raise PrepError(
            f"the dataset card lacks {missing} of processor {processor.name!r}; pack the data again"
        ) from None
    channels = rebuilt.channels
    if len(whitening.mean) != len(whitening.std) or len(whitening.mean) % channels:
        raise PrepError(
            f"the dataset card has {len(whitening.mean)} means and {len(whitening.std)} deviations"
            f" for the {rebuilt.channels} channels of {processor.name!r}; pack the data again"
        )
    return rebuilt


__all__ = ["PROCESSORS", "Pixel", "Place", "Processor", "from_card", "named"]
