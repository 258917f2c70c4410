"""Codecs of FLUX, Wan, HunyuanVideo 1.5 and Cosmos, normalised as their Diffusers pipelines do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder


@dataclass(frozen=True, kw_only=True)
class Flux(Autoencoder):
    """Images; latents are (latent - shift) * scale."""

    name: ClassVar[str] = "flux"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as FluxPipeline"
    media: ClassVar[tuple[str, ...]] = ("image",)
    default_model: ClassVar[str] = "black-forest-labs/FLUX.1-dev"
    weights: ClassVar[str] = default_model
    vae: ClassVar[str] = "AutoencoderKL"
    text_encoder: ClassVar[str] = "flux"
    has_time: ClassVar[bool] = False

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        channels = config["latent_channels"]
        shift, scale = config.get("shift_factor") or 0.0, config["scaling_factor"]
        return Whitening(mean=(shift,) * channels, std=(1 / scale,) * channels)

    @property
    def stride(self) -> int:
        return 2 ** (len(self._config["block_out_channels"]) - 1)


@dataclass(frozen=True, kw_only=True)
class Wan(Autoencoder):
    """Images and videos of 4n + 1 frames; CLIP features for image-to-video."""

    name: ClassVar[str] = "wan"
    description: ClassVar[str] = "(latent - mean) / std, as WanPipeline; 4n+1 frames"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    default_model: ClassVar[str] = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    weights: ClassVar[str] = default_model
    vae: ClassVar[str] = "AutoencoderKLWan"
    image_encoder: ClassVar[str | None] = "CLIPVisionModel"
    text_encoder: ClassVar[str] = "wan"

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        return Whitening(mean=tuple(config["latents_mean"]), std=tuple(config["latents_std"]))

    @property
    def stride(self) -> int:
        return self._config["scale_factor_spatial"]

    @property
    def temporal_stride(self) -> int:
        return self._config["scale_factor_temporal"]

    def features_of(self, answer: Any) -> Tensor:
        return answer.hidden_states[-2]


@dataclass(frozen=True, kw_only=True)
class Hunyuan(Autoencoder):
    """Images and videos of 4n + 1 frames; SigLIP features for image-to-video."""

    name: ClassVar[str] = "hunyuan"
    description: ClassVar[str] = "latent * scaling_factor, as HunyuanVideo15Pipeline; 4n+1 frames"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    default_model: ClassVar[str] = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    weights: ClassVar[str] = default_model
    vae: ClassVar[str] = "AutoencoderKLHunyuanVideo15"
    image_encoder: ClassVar[str | None] = "SiglipVisionModel"
    image_processor: ClassVar[str] = "feature_extractor"
    takes_batches: ClassVar[bool] = False  # Diffusers' mask in its attention fits one sample
    text_encoder: ClassVar[str] = "hunyuan"

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        channels = config["latent_channels"]
        return Whitening(mean=(0.0,) * channels, std=(1 / config["scaling_factor"],) * channels)

    @property
    def stride(self) -> int:
        return self._config["spatial_compression_ratio"]

    @property
    def temporal_stride(self) -> int:
        return self._config["temporal_compression_ratio"]


@dataclass(frozen=True, kw_only=True)
class Cosmos(Autoencoder):
    """Images and videos of 8n + 1 frames. The factor sigma_data is left to the objective."""

    name: ClassVar[str] = "cosmos"
    description: ClassVar[str] = "(latent - latents_mean) / latents_std by frame; 8n+1 frames"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    default_model: ClassVar[str] = "nvidia/Cosmos-1.0-Diffusion-7B-Text2World"
    weights: ClassVar[str] = default_model
    vae: ClassVar[str] = "AutoencoderKLCosmos"
    text_encoder: ClassVar[str] = "cosmos"

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        if config.get("latents_mean") is None:
            return Whitening.identity(config["latent_channels"])
        return Whitening(mean=tuple(config["latents_mean"]), std=tuple(config["latents_std"]))

    @property
    def stride(self) -> int:
        return self._config["spatial_compression_ratio"]

    @property
    def temporal_stride(self) -> int:
        return self._config["temporal_compression_ratio"]
