"""Reads and describes the sound of a sample in a shard: its file, its object in `.json`."""

# C channels of sound, S samples, K channels of a latent, A frames of a latent

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dit.codecs.sound.codec import SoundCodec
from dit.parsing import cause

PART = "sound.safetensors"
"""The ending of files that hold the latent [K, A] of a sample's sound."""
ABOUT = "sound"
"""Key of the sound's object in the `.json` of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSound:
    """The latent of a sample's sound, as stored in a shard, and the form of its waveform.

    The waveform had `rate` samples per second, `channels` channels and `samples` samples.
    """

    latent_KA: Tensor
    rate: int
    channels: int
    samples: int

    def waveform(self, codec: SoundCodec) -> Tensor:
        """Decodes the latent to a waveform [C, S].

        The silence that filled the last latent frame is cut off.
        """
        return codec.decode(self.latent_KA, self.samples)

    @property
    def seconds(self) -> float:
        return self.samples / self.rate


def about_sound(codec: SoundCodec, samples_CS: Tensor) -> dict[str, int]:
    """The object in a sample's `.json` about its sound, the waveform `samples_CS` [C, S].

    Its keys are `rate` (samples per second), `channels` and `samples`.
    """
    channels, samples = samples_CS.shape
    return {"rate": codec.rate, "channels": channels, "samples": samples}


def read_sound(parts: Mapping[str, bytes], about: Mapping[str, Any]) -> StoredSound | None:
    """Reads the sound of a sample; None if the sample has none.

    `parts` are the contents of the sample's files by their endings; `about` is its parsed `.json`.

    Raises:
        ValueError: the file or its object in the `.json` is damaged, or only one of them is there.
    """
    said, payload = about.get(ABOUT), parts.get(PART)
    if said is None and payload is None:
        return None
    if payload is None or not isinstance(said, dict):
        raise ValueError(
            f".json has {ABOUT}={said!r}, and the file .{PART} is"
            f" {'missing' if payload is None else 'there'}, but a sample has both or neither; pack"
            " the data again"
        )
    try:
        latent_KA = safetensors.torch.load(bytes(payload))["latent"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f".{PART} cannot be read ({cause(error)}); restore the shard, or pack the data again"
        ) from error
    numbers: dict[str, Any] = {n: said.get(n) for n in ("rate", "channels", "samples")}
    if latent_KA.dim() != 2 or not all(type(n) is int and n > 0 for n in numbers.values()):
        shape = list(latent_KA.shape)
        raise ValueError(
            f".{PART} has shape {shape} and .json has {numbers}, but must have [K, A] and numbers"
            " above 0; pack the data again"
        )
    return StoredSound(latent_KA=latent_KA, **numbers)
