"""Codecs of HunyuanVideo and HunyuanVideo 1.5, as in Diffusers' pipelines."""

# C latent channels, F frames, H rows, W columns

from __future__ import annotations

from typing import Any

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder


class Hunyuan(Autoencoder):
    """Codec of HunyuanVideo 1.5: videos of 4n + 1 frames, SigLIP features of the first frame."""

    name = text_encoder = "hunyuan"
    description = "latent * scaling_factor, as HunyuanVideo15Pipeline; 4n+1 frames"
    media = ("image", "video")
    default_model = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    vae = "AutoencoderKLHunyuanVideo15"
    workloads = ("t2v", "i2v")
    image_encoder = "SiglipVisionModel"
    image_processor = "feature_extractor"
    takes_batches = False  # Diffusers' mask in its attention fits one sample
    tuning = ("conf/hunyuan15_lora.yaml",)

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        channels = config["latent_channels"]
        return Whitening(mean=(0.0,) * channels, std=(1 / config["scaling_factor"],) * channels)


class HunyuanVideo(Hunyuan):
    """The codec of the first HunyuanVideo, which has no image encoder."""

    name = text_encoder = "hunyuanvideo"
    description = "latent * scaling_factor, as HunyuanVideoPipeline; 4n+1 frames"
    default_model = "hunyuanvideo-community/HunyuanVideo"
    vae = "AutoencoderKLHunyuanVideo"
    image_encoder = None
    takes_batches = True
    tuning = ("conf/hunyuanvideo_lora.yaml",)

    @property
    def notices(self) -> tuple[str, ...]:
        if not self.image_conditioning:
            return ()
        return (
            "texts are those of the captions alone; the published image-to-video networks also read"
            " rows that Llava makes of the first frame: --processor hunyuanvideo_i2v stores these",
        )


class HunyuanVideoI2V(HunyuanVideo):
    """The codec of HunyuanVideo I2V, whose text encoder reads the first frame."""

    name = text_encoder = "hunyuanvideo_i2v"
    description = "as hunyuanvideo; text of the caption and the first frame"
    default_model = "hunyuanvideo-community/HunyuanVideo-I2V"
    workloads = ("i2v",)
    tuning = ("conf/hunyuanvideo_lora.yaml", "model.name=custom")

    @property
    def notices(self) -> tuple[str, ...]:
        return ()
