"""Codecs (VAEs) by name. To add one, subclass `Codec` in a file of this folder.

codec          the interface: video -> whitened latent -> pictures
pixel          the codec without weights: space to depth
autoencoder    codecs on the autoencoders of Diffusers
flux           those of FLUX.1 and of families with its kind of latents
families       those of most other families
flux2          that of FLUX.2, whose statistics are those of a batch norm
hunyuan_video  those of HunyuanVideo and of its version 1.5
ltx            those of LTX-Video and LTX-2, whose statistics lie beside its weights
latent_upsampler  the network that enlarges latents of LTX-2, between two stages of sampling
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from dit.codecs.dataset_card import CodecError, part_of_card
from dit.codecs.dataset_encoder import Registry, classes_of, lacking
from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import ModelLocation
from dit.codecs.vae.codec import Codec
from dit.codecs.vae.pixel import Pixel

CODECS = Registry(
    Codec, classes_of(Codec, sys.modules[__name__]), known="--list_processors shows those known"
)
codec_named = CODECS.named


def codec_of_card(card: dict[str, Any], location: ModelLocation | None = None) -> Codec:
    """The codec that encoded a dataset, by its `card`; `decode` turns its latents into pictures.

    `location` says where its model is now; with None, it is where the card says.

    Raises:
        CodecError: the card names no known codec, lacks a setting, or has a wrong number of means
            and deviations; or the codec's model is missing.
    """
    codec = CODECS.of_card(card, location)
    latent = part_of_card(card, "latent")
    try:
        whitening = Whitening(mean=tuple(latent["mean"]), std=tuple(latent["std"]))
    except KeyError as missing:
        raise lacking(codec, missing) from None
    if len(whitening.mean) != len(whitening.std) or len(whitening.mean) % codec.channels:
        raise CodecError(
            f"the dataset card has {len(whitening.mean)} means and {len(whitening.std)} deviations"
            f" for the {codec.channels} channels of {codec.name!r}; pack the data again"
        )
    return replace(codec, whitening=whitening)


def usual_size(card: dict[str, Any]) -> dict[str, int]:
    """The most frequent size in a dataset: a dict with `num_frames`, `height` and `width` (pixels).

    If the card lists no sizes, the dict has only `num_frames` 1 for a codec of pictures alone, and
    is empty otherwise.
    """
    if sizes := card.get("sizes"):
        return sizes[0]
    codec = CODECS.get(str(card.get("processor", {}).get("name")))
    return {"num_frames": 1} if codec is not None and "video" not in codec.media else {}
