"""The sound codec of LTX-2: log-mel spectrograms, their autoencoder, and a vocoder."""

# C channels of sound, S samples, K channels of a latent, A frames of a latent
# T B frames and bins of a mel spectrogram, M bins of a latent

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import (
    PipelineComponent,
    load,
    model_config_of,
    stored_class,
    tensors_of,
)
from dit.codecs.sound.codec import SoundCodec

_WINDOW = 1024
"""Samples of the window of a spectrogram."""
_SHRINKS = 4
"""Mel frames in a latent frame, and mel bins in a latent bin."""
_LEAST = 1e-5
"""Smallest amplitude of a mel bin before its logarithm."""
_LIBRARY = "diffusers.pipelines.ltx2"
_VOCODERS = ("LTX2Vocoder", "LTX2VocoderWithBWE")


@dataclass(frozen=True, kw_only=True)
class Ltx2Sound(SoundCodec):
    """The sound codec of LTX-2, whose models are in `audio_vae` and `vocoder` of its pipelines.

    A waveform becomes a log-mel spectrogram, which the autoencoder shrinks to 25 latent frames a
    second; latents are whitened as in `LTX2Pipeline`. The vocoder turns a decoded spectrogram into
    a waveform, at a rate of its own (`decoded_rate`). Autoencoder and vocoder compute in float32.
    """

    name = "ltx2"
    description = "latents of mel spectrograms, as LTX2Pipeline; 25 frames a second"
    default_model: ClassVar[str] = "Lightricks/LTX-2.5-Diffusers"
    options = frozenset(("model_name", "vae_cache_folder"))

    model_name: str
    cache: str | None = None
    device: str = "cpu"
    local_only: bool = False

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        cache = str(args.vae_cache_folder) if args.vae_cache_folder else None
        return cls(model_name=args.model_name or cls.default_model, cache=cache)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        places = {name: settings[name] for name in ("cache", "local_only") if name in settings}
        return cls(model_name=settings["model_name"], **places)

    @property
    def settings(self) -> dict[str, Any]:
        return {"model_name": self.model_name, "rate": self.rate, "frames_a_second": self._frames}

    def on(self, device: str) -> Self:
        return replace(self, device=device)

    @property
    def rate(self) -> int:
        return self._config["sample_rate"]

    @property
    def decoded_rate(self) -> int:
        return self._vocoder_config["output_sampling_rate"]

    @property
    def sound_channels(self) -> int:
        return self._config["in_channels"]

    @property
    def channels(self) -> int:
        return self._config["latent_channels"] * self._bins

    def frames_of(self, samples: int) -> int:
        return max(1, round(samples / self.rate * self._frames))

    def encode_raw(self, samples_CS: Tensor) -> Tensor:
        model = load(replace(self._part, precision="float32", device=self.device))
        with torch.inference_mode():
            mel_1CTB = self.spectrogram(samples_CS).to(self.device)[None]
            latent_KAM = model.encode(mel_1CTB).latent_dist.mode()[0].float().cpu()
        latent_KA = latent_KAM.transpose(1, 2).flatten(0, 1)
        # The frame behind the last whole one begins where the waveform ends.
        latent_KA = latent_KA[:, : self.frames_of(samples_CS.shape[1])]
        return self._whitening.apply(latent_KA[..., None, None])[..., 0, 0].contiguous()

    def decode_raw(self, latent_KA: Tensor) -> Tensor:
        raw_KA = self._whitening.undo(latent_KA[..., None, None])[..., 0, 0]
        latent_KAM = raw_KA.unflatten(0, (-1, self._bins)).transpose(1, 2)
        at: Any = {"precision": "float32", "device": self.device}
        model, vocoder = (load(replace(part, **at)) for part in (self._part, self._vocoder))
        with torch.inference_mode():
            mel_1CTB = model.decode(latent_KAM[None].to(self.device)).sample
            return vocoder(mel_1CTB)[0].float().cpu()

    def spectrogram(self, samples_CS: Tensor) -> Tensor:
        """The log-mel spectrogram [C, T, B] of a waveform [C, S], with Slaney's mel scale and norm.

        Frames are `mel_hop_length` samples apart (a setting of the model); the first frame is
        centred on the first sample. Waveforms shorter than half a window are padded with silence.
        """
        config = self._config
        missing = _WINDOW // 2 + 1 - samples_CS.shape[1]
        samples_CS = pad(samples_CS.float().cpu(), (0, max(0, missing)))
        spectrum_CFT = torch.stft(
            samples_CS,
            _WINDOW,
            hop_length=config["mel_hop_length"],
            window=torch.hann_window(_WINDOW),
            return_complex=True,
        )
        mel_CTB = spectrum_CFT.abs().transpose(1, 2) @ _mel_filters(self.rate, config["mel_bins"])
        return mel_CTB.clamp(min=_LEAST).log()

    @property
    def _frames(self) -> float:
        """Latent frames a second."""
        return self.rate / self._config["mel_hop_length"] / _SHRINKS

    @property
    def _bins(self) -> int:
        return self._config["mel_bins"] // _SHRINKS

    @property
    def _part(self) -> PipelineComponent:
        return PipelineComponent.of(self, "diffusers", "AutoencoderKLLTX2Audio", self.subfolder)

    @property
    def _config(self) -> dict[str, Any]:
        return model_config_of(self._part)

    @property
    def _vocoder(self) -> PipelineComponent:
        part = PipelineComponent.of(self, _LIBRARY, _VOCODERS[0], "vocoder")
        return replace(part, kind=stored_class(part, _VOCODERS))

    @property
    def _vocoder_config(self) -> dict[str, Any]:
        return model_config_of(self._vocoder)

    @property
    def _whitening(self) -> Whitening:
        found = tensors_of(self._part, ("latents_mean", "latents_std"))
        mean_K, std_K = (found[name].tolist() for name in ("latents_mean", "latents_std"))
        return Whitening(mean=tuple(mean_K), std=tuple(std_K))


@lru_cache
def _mel_filters(rate: int, bins: int) -> Tensor:
    """The filters [F, B] from a spectrum to mel bins, float32."""
    from transformers.audio_utils import mel_filter_bank

    filters_FB = mel_filter_bank(
        _WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(filters_FB).float()
