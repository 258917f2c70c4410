"""Codecs of HunyuanVideo and of its version 1.5, as in Diffusers' pipelines."""

# C latent channels, F frames, H rows, W columns

from __future__ import annotations

from typing import Any, ClassVar

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder


class Hunyuan(Autoencoder):
    """Images and videos of 4n + 1 frames; SigLIP features for image-to-video."""

    name: ClassVar[str] = "hunyuan"
    description: ClassVar[str] = "latent * scaling_factor, as HunyuanVideo15Pipeline; 4n+1 frames"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    default_model: ClassVar[str] = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    vae: ClassVar[str] = "AutoencoderKLHunyuanVideo15"
    workloads: ClassVar[tuple[str, ...]] = ("t2v", "i2v")
    image_encoder: ClassVar[str | None] = "SiglipVisionModel"
    image_processor: ClassVar[str] = "feature_extractor"
    takes_batches: ClassVar[bool] = False  # Diffusers' mask in its attention fits one sample
    text_encoder: ClassVar[str] = "hunyuan"
    tuning: ClassVar[tuple[str, ...]] = ("conf/hunyuan15_lora.yaml",)

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        channels = config["latent_channels"]
        return Whitening(mean=(0.0,) * channels, std=(1 / config["scaling_factor"],) * channels)


class HunyuanVideo(Hunyuan):
    """The same of the first HunyuanVideo, which has no image encoder of its own."""

    name: ClassVar[str] = "hunyuanvideo"
    description: ClassVar[str] = "latent * scaling_factor, as HunyuanVideoPipeline; 4n+1 frames"
    default_model: ClassVar[str] = "hunyuanvideo-community/HunyuanVideo"
    vae: ClassVar[str] = "AutoencoderKLHunyuanVideo"
    image_encoder: ClassVar[str | None] = None
    takes_batches: ClassVar[bool] = True
    text_encoder: ClassVar[str] = "hunyuanvideo"
    tuning: ClassVar[tuple[str, ...]] = ("conf/hunyuanvideo_lora.yaml",)

    @property
    def notices(self) -> tuple[str, ...]:
        if not self.image_conditioning:
            return ()
        return (
            "texts are those of the captions alone; the published image-to-video networks read rows"
            " before them that Llava makes of the first frame: --processor hunyuanvideo_i2v",
        )


class HunyuanVideoI2V(HunyuanVideo):
    """The same for image-to-video, whose text encoder sees the first frame."""

    name: ClassVar[str] = "hunyuanvideo_i2v"
    description: ClassVar[str] = "as hunyuanvideo; text of the caption and the first frame"
    default_model: ClassVar[str] = "hunyuanvideo-community/HunyuanVideo-I2V"
    workloads: ClassVar[tuple[str, ...]] = ("i2v",)
    text_encoder: ClassVar[str] = "hunyuanvideo_i2v"
    tuning: ClassVar[tuple[str, ...]] = ("conf/hunyuanvideo_lora.yaml", "model.name=custom")

    @property
    def notices(self) -> tuple[str, ...]:
        return ()
