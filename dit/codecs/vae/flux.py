"""Codecs whose latents are normalised as (latent - shift) * scale, as in FLUX."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Self

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder


class FluxAutoencoder(Autoencoder):
    """Autoencoders of images whose latents are normalised as (latent - shift) * scale."""

    media = ("image",)
    vae = "AutoencoderKL"
    has_time = False

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        channels = config["latent_channels"]
        shift, scale = config.get("shift_factor") or 0.0, config["scaling_factor"]
        return Whitening(mean=(shift,) * channels, std=(1 / scale,) * channels)

    @property
    def stride(self) -> int:
        return 2 ** (len(self._config["block_out_channels"]) - 1)


class Flux(FluxAutoencoder):
    """The codec of FLUX.1: images, and references as FLUX.1 Kontext reads them."""

    name = text_encoder = "flux"
    description = "(latent - shift_factor) * scaling_factor, as FluxPipeline"
    default_model = "black-forest-labs/FLUX.1-dev"
    tuning = ("conf/flux_lora.yaml",)
    tuning_of_edits = ("model.name=flux1_kontext",)
    edits_pictures = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """The resolution in Kontext's list with the nearest aspect, as in FluxKontextPipeline.

        Returns (width, height), which are multiples of 16 pixels, the side of a token.
        """
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        # Its image processor drops what is not a whole token before it takes the ratio.
        width, height = (max(16, side - side % 16) for side in (width, height))
        ratio = width / height
        _, wide, high = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        return wide, high


class Sd3(FluxAutoencoder):
    """The codec of Stable Diffusion 3: images, normalised like FLUX's, by another autoencoder."""

    name = text_encoder = "sd3"
    description = "(latent - shift_factor) * scaling_factor, as StableDiffusion3Pipeline"
    default_model = "stabilityai/stable-diffusion-3-medium-diffusers"
    tuning = ("conf/sd3_lora.yaml", "model.name=sd3")


class HunyuanImage(FluxAutoencoder):
    """Codec of HunyuanImage: images with cells of 32 x 32 pixels; latents are only scaled."""

    name = text_encoder = "hunyuanimage"
    description = "latent * scaling_factor, as HunyuanImagePipeline"
    default_model = "hunyuanvideo-community/HunyuanImage-2.1-Diffusers"
    vae = "AutoencoderKLHunyuanImage"
    tuning = ("conf/hunyuanimage_lora.yaml",)

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        if args.tiling:
            raise CodecError(
                f"--tiling: processor {cls.name!r} encodes no tiles ({cls.vae} of Diffusers 0.42"
                " expects a video there); leave it out"
            )
        return super().from_arguments(args)

    @property
    def stride(self) -> int:
        return self._config["spatial_compression_ratio"]


class Chroma(FluxAutoencoder):
    """The codec of Chroma: images, by FLUX's autoencoder."""

    name = text_encoder = "chroma"
    description = "(latent - shift_factor) * scaling_factor, as ChromaPipeline"
    default_model = "lodestones/Chroma1-HD"
    tuning = ("conf/chroma_lora.yaml",)


class Lumina2(FluxAutoencoder):
    """The codec of Lumina Image 2.0: images, by FLUX's autoencoder."""

    name = text_encoder = "lumina2"
    description = "(latent - shift_factor) * scaling_factor, as Lumina2Pipeline"
    default_model = "Alpha-VLLM/Lumina-Image-2.0"
    tuning = ("conf/lumina2_lora.yaml",)


class LongCat(FluxAutoencoder):
    """The codec of LongCat-Image: images, by FLUX's autoencoder."""

    name = text_encoder = "longcat"
    description = "(latent - shift_factor) * scaling_factor, as LongCatImagePipeline"
    default_model = "meituan-longcat/LongCat-Image"
    tuning = ("conf/longcat_lora.yaml",)


class LongCatEdit(LongCat):
    """Codec of LongCat-Image-Edit: LongCat's; its text encoder reads one control picture."""

    name = text_encoder = "longcat_edit"
    description = "as longcat; text of the caption and one control picture"
    default_model = "meituan-longcat/LongCat-Image-Edit"
    tuning = ("conf/longcat_lora.yaml", "model.name=longcat_image_edit")
    edits_pictures = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """About a megapixel of the same aspect, as in LongCatImageEditPipeline.

        Sides are multiples of 16 pixels.
        """
        from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import (
            calculate_dimensions,
        )

        return calculate_dimensions(1024 * 1024, width / height)


class ZImage(FluxAutoencoder):
    """The codec of Z-Image: images, by FLUX's autoencoder."""

    name = text_encoder = "zimage"
    description = "(latent - shift_factor) * scaling_factor, as ZImagePipeline"
    default_model = "Tongyi-MAI/Z-Image"
    tuning = ("conf/zimage_lora.yaml",)


class HiDream(FluxAutoencoder):
    """The codec of HiDream-I1: images, by FLUX's autoencoder."""

    name = text_encoder = "hidream"
    description = "(latent - shift_factor) * scaling_factor, as HiDreamImagePipeline"
    default_model = "HiDream-ai/HiDream-I1-Full"
    tuning = ("conf/hidream_lora.yaml",)


class OmniGen2(FluxAutoencoder):
    """Codec of OmniGen2: FLUX's autoencoder; the text encoder does not read references."""

    name = text_encoder = "omnigen2"
    description = "(latent - shift_factor) * scaling_factor, as OmniGen2Pipeline"
    default_model = "OmniGen2/OmniGen2"
    tuning = ("conf/omnigen2_lora.yaml",)
    tuning_of_edits = ("model.reference_latents=5",)
    edits_pictures = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """`width` and `height` scaled down to at most 1024 pixels each, as in OmniGen2Pipeline.

        Sides are rounded down to multiples of 16 pixels, and are at least 16.
        """
        # Equal for squares but for rounding, which takes a token from the sides of some.
        ratio = min(1024 / max(width, height), (1024**2 / (width * height)) ** 0.5, 1.0)
        wide, high = (int(side * ratio) // 16 * 16 for side in (width, height))
        return max(wide, 16), max(high, 16)
