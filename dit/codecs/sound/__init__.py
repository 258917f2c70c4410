"""Reads the sound of files as waveforms in step with their frames, and encodes it.

tracks      a file with sound -> its track; a span of it -> samples at the rate of a codec
codec       the interface: waveform -> scaled latent -> waveform
wave        the codec without weights: frames of samples
ltx2        the codec of LTX-2: an autoencoder of mel spectrograms, and a vocoder
files       waveform -> WAV, MP4 with AAC, and a picture to look at
sound_part  what a shard holds of the sound of a sample
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dit.codecs.dataset_card import CodecError, part_of_card
from dit.codecs.dataset_encoder import Registry
from dit.codecs.pretrained import ModelLocation
from dit.codecs.sound.codec import SoundCodec
from dit.codecs.sound.ltx2 import Ltx2Sound
from dit.codecs.sound.wave import Wave

SOUND_CODECS = Registry(SoundCodec, (Wave, Ltx2Sound), known="known are")
SOUND_LATENT = "sound_latent"
"""Key of a dataset card with the number of channels, dtype and scale of sound latents."""


def sound_codec_of_card(
    card: dict[str, Any], location: ModelLocation | None = None
) -> SoundCodec | None:
    """The sound codec that a dataset card describes; None for a dataset without sound.

    Its scale is that of the dataset. `location` says where the codec's model is now; with None, it
    is where the card says.

    Raises:
        CodecError: the card names no known codec, lacks a setting or a positive scale, or the
            codec's model is missing.
    """
    if SoundCodec.card_part not in card:
        return None
    codec, latent = SOUND_CODECS.of_card(card, location), part_of_card(card, SOUND_LATENT)
    scale = latent.get("scale")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not scale > 0:
        raise CodecError(
            f"the dataset card has {SOUND_LATENT}.scale={scale!r}, not a number above 0; pack the"
            " data again"
        )
    return replace(codec, scale=float(scale))


def sound_in_card(codec: SoundCodec | None) -> dict[str, Any]:
    """Entries of a dataset card about the sound codec of the dataset; empty without one."""
    if codec is None:
        return {}
    return {
        codec.card_part: {"name": codec.name, **codec.settings},
        SOUND_LATENT: {"channels": codec.channels, "dtype": "float32", "scale": codec.scale},
    }
