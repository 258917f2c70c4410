"""The codecs of LTX-Video and LTX-2, whose statistics lie beside their weights."""

# C latent channels, F frames, H rows, W columns

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder


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

    decoder_level: ClassVar[float] = 0.05
    """Timestep of decoders that expect noise (`timestep_conditioning`)."""
    decoder_noise: ClassVar[float] = 0.025
    """Fraction of noise that is mixed into the latents for decoders that expect noise."""

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
        mixed_CFHW = torch.lerp(latent_CFHW.float().cpu(), noise_CFHW, self.decoder_noise)
        told = torch.tensor([self.decoder_level], device=model.device, dtype=model.dtype)
        with torch.inference_mode():
            latent = mixed_CFHW[None].to(model.device, model.dtype)
            return model.decode(latent, told).sample[0].float()


class Ltx2(Ltx):
    """The codec of LTX-2's video: clips of 8n + 1 frames, latent cells of 32 x 32 pixels.

    Its pipelines mix no noise into the latents that they decode.
    """

    name = text_encoder = "ltx2"
    description = "(latent - mean) * scaling_factor / std, as LTX2Pipeline; 8n+1 frames"
    default_model = "Lightricks/LTX-2.5-Diffusers"
    vae = "AutoencoderKLLTX2Video"
    tuning = ("conf/ltx2_lora.yaml", "model.name=ltx2.5")
    decoder_level, decoder_noise = 0.0, 0.0


class Ltx2Connected(Ltx2):
    """The codec of LTX-2 for shards that hold the text embeddings that its connectors make."""

    name = text_encoder = "ltx2_connected"
    description = "as ltx2; text for model.text_connectors=stored"
