"""The codec of LTX-Video, whose statistics are stored beside its weights."""

# C latent channels, F frames, H rows, W columns

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder

DECODER_LEVEL, DECODER_NOISE = 0.05, 0.025
"""The timestep that decoders get from version 0.9.1 on, and the fraction of noise in their input.
"""


@dataclass(frozen=True, kw_only=True)
class Ltx(Autoencoder):
    """The codec of LTX-Video: videos of 8n + 1 frames, latent cells of 32 x 32 pixels.

    Decoders from version 0.9.1 on are trained on latents with a little noise, which they remove.
    """

    name = text_encoder = "ltx"
    description = "(latent - mean) * scaling_factor / std, as LTXConditionPipeline; 8n+1 frames"
    media = ("image", "video")
    default_model = "Lightricks/LTX-Video-0.9.5"
    workloads = ("t2v", "i2v")
    vae = "AutoencoderKLLTXVideo"
    tuning = ("conf/ltx_lora.yaml", "model.name=ltxv_2b")
    tuning_of_edits = ("model.reference_latents=1",)
    patch = 1
    statistics = ("latents_mean", "latents_std")

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        mean_C, std_C = (config[name].double() for name in cls.statistics)
        std_C = std_C / config["scaling_factor"]
        return Whitening(mean=tuple(mean_C.tolist()), std=tuple(std_C.tolist()))

    @property
    def stride(self) -> int:
        own = self._config.get("spatial_compression_ratio")
        return own or self._config["patch_size"] * self._halvings

    @property
    def temporal_stride(self) -> int:
        own = self._config.get("temporal_compression_ratio")
        return own or self._config["patch_size_t"] * self._halvings

    @property
    def _halvings(self) -> int:
        return 2 ** sum(self._config["spatio_temporal_scaling"])

    @property
    def notices(self) -> tuple[str, ...]:
        return ()

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        """The video of a latent before whitening, float32.

        Decoders that expect noise always get the same noise for latents of one size, so that
        results repeat.
        """
        if not self._config["timestep_conditioning"]:
            return super().decode_raw(latent_CFHW)
        model, generator = self.model, torch.Generator().manual_seed(0)
        noise_CFHW = torch.randn(latent_CFHW.shape, generator=generator)
        mixed_CFHW = torch.lerp(latent_CFHW.float().cpu(), noise_CFHW, DECODER_NOISE)
        told = torch.tensor([DECODER_LEVEL], device=model.device, dtype=model.dtype)
        with torch.inference_mode():
            latent = mixed_CFHW[None].to(model.device, model.dtype)
            return model.decode(latent, told).sample[0].float()
