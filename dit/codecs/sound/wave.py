"""The sound codec without weights: a latent frame is a piece of the waveform."""

# C channels of sound, S samples, K channels of a latent, A frames of a latent

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.nn.functional import pad

from dit.codecs.dataset_card import CodecError
from dit.codecs.encoder_options import WaveOptions
from dit.codecs.sound.codec import SoundCodec
from dit.command_line import option_names

_RATES = (1000, 192_000)


@dataclass(frozen=True, kw_only=True)
class Wave(SoundCodec):
    """Sound codec without weights: `frame` samples of each channel form one latent frame.

    Channels of a latent are ordered (channel of sound, sample). Silence fills the last frame.
    Latents are float32, divided by a power of two, so that every sample is restored exactly.
    """

    name = "wave"
    description = "the samples themselves, in frames; scaled by the dataset"
    scales_by_dataset = True

    wave_rate: int
    wave_channels: int
    frame: int

    def __post_init__(self) -> None:
        least, most = _RATES
        if not least <= self.wave_rate <= most:
            raise CodecError(f"--wave_rate {self.wave_rate} must lie in {least} to {most} Hz")
        if self.wave_channels not in (1, 2):
            raise CodecError(f"--wave_channels {self.wave_channels} must be 1 (mono) or 2 (stereo)")
        if not 1 <= self.frame <= self.wave_rate:
            raise CodecError(
                f"--wave_frame {self.frame} must lie in 1 to {self.wave_rate} samples, a second"
            )

    options = frozenset(option_names(WaveOptions))

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        return cls(
            wave_rate=args.wave_rate, wave_channels=args.wave_channels, frame=args.wave_frame
        )

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        rate, channels, frame = (int(settings[k]) for k in ("rate", "sound_channels", "frame"))
        return cls(wave_rate=rate, wave_channels=channels, frame=frame)

    @property
    def settings(self) -> dict[str, Any]:
        return {"rate": self.rate, "sound_channels": self.sound_channels, "frame": self.frame}

    @property
    def rate(self) -> int:
        return self.wave_rate

    @property
    def sound_channels(self) -> int:
        return self.wave_channels

    @property
    def channels(self) -> int:
        return self.wave_channels * self.frame

    def frames_of(self, samples: int) -> int:
        return -(-samples // self.frame)

    def encode_raw(self, samples_CS: Tensor) -> Tensor:
        frames = self.frames_of(samples_CS.shape[1])
        whole_CS = pad(samples_CS, (0, frames * self.frame - samples_CS.shape[1]))
        pieces_CAS = whole_CS.unflatten(1, (frames, self.frame))
        return pieces_CAS.transpose(1, 2).flatten(0, 1).contiguous()

    def decode_raw(self, latent_KA: Tensor) -> Tensor:
        pieces_CSA = latent_KA.unflatten(0, (self.wave_channels, self.frame))
        return pieces_CSA.transpose(1, 2).flatten(1).contiguous()
