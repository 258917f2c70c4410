"""The interface of sound codecs, for data preparation and generation."""

# C channels of sound, S samples, K channels of a latent, A frames of a latent

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from dit.codecs.dataset_encoder import DatasetEncoder
from dit.codecs.normalization import Moments


@dataclass(frozen=True, kw_only=True)
class SoundCodec(DatasetEncoder):
    """Converts waveforms to latents, and latents to waveforms.

    To add a codec, write a subclass and add it to `SOUND_CODECS`.
    """

    kind: ClassVar[str] = "audio processor"
    card_part: ClassVar[str] = "audio_processor"
    subfolder: ClassVar[str] = "audio_vae"

    description: ClassVar[str]
    scale: float = 1.0
    """Number by which latents are divided, so that their standard deviation is about 1."""

    @property
    @abstractmethod
    def rate(self) -> int:
        """Samples per second of the waveform."""

    @property
    def decoded_rate(self) -> int:
        """Samples per second of decoded waveforms; that of encoded ones, unless overridden."""
        return self.rate

    @property
    @abstractmethod
    def sound_channels(self) -> int:
        """Channels of the waveform: 1 (mono) or 2 (stereo)."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels of a latent, K."""

    @abstractmethod
    def frames_of(self, samples: int) -> int:
        """Number of latent frames of a waveform of `samples` samples."""

    @abstractmethod
    def encode_raw(self, samples_CS: Tensor) -> Tensor:
        """The latent [K, A] of a waveform [C, S] in [-1, 1], before division by `scale`."""

    @abstractmethod
    def decode_raw(self, latent_KA: Tensor) -> Tensor:
        """Decodes a latent [K, A] that is not divided by `scale`.

        Returns a waveform [C, S] at `decoded_rate`, as long as the latent's frames are.
        """

    scales_by_dataset: ClassVar[bool] = False
    """Whether `scale` is measured on the sound of each dataset, before encoding."""

    def measure(self, samples_CS: Tensor) -> Moments:
        """Mean and variance of all samples of one waveform."""
        moments = Moments()
        moments.add(samples_CS.reshape(1, -1))
        return moments

    def fitted(self, moments: Moments) -> Self:
        """A copy whose scale is the power of two nearest to the standard deviation of `moments`.

        Without samples in `moments` the scale is 1.
        """
        deviation = moments.whitening().std[0] if moments.count else 1.0
        return replace(self, scale=2.0 ** round(math.log2(deviation)))

    def encode(self, samples_CS: Tensor) -> Tensor:
        """The scaled latent [K, A], float32, of a waveform [C, S] in [-1, 1].

        Raises:
            ValueError: the waveform has another number of channels than `sound_channels`.
        """
        if samples_CS.dim() != 2 or samples_CS.shape[0] != self.sound_channels:
            raise ValueError(
                f"{self.kind} {self.name!r} encodes waveforms [{self.sound_channels}, S], but was"
                f" given {list(samples_CS.shape)}; mix the sound to {self.sound_channels} channels"
            )
        return self.encode_raw(samples_CS.float()) / self.scale

    def decode(self, latent_KA: Tensor, samples: int | None = None) -> Tensor:
        """Decodes a scaled latent [K, A] to a waveform [C, S], float32, on the CPU.

        The waveform has `decoded_rate` samples per second. It is cut to the duration of `samples`
        samples at `rate`; with None, it is as long as the latent's frames.

        Raises:
            ValueError: the latent is not [K, A] with the channels of this codec.
        """
        if latent_KA.dim() != 2 or latent_KA.shape[0] != self.channels:
            raise ValueError(
                f"{self.kind} {self.name!r} decodes latents [{self.channels}, A], but was given"
                f" {list(latent_KA.shape)}; use the dataset card that the model was trained with"
            )
        if samples is not None:
            samples = round(samples * self.decoded_rate / self.rate)
        return self.decode_raw(latent_KA.float().cpu() * self.scale)[:, :samples]
