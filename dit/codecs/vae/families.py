"""Codecs of all families, as in Diffusers' pipelines."""

# N samples, C colour or latent channels, F frames, H rows, W columns, E width

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder, picture_of
from dit.codecs.vae.flux2 import Flux2, Flux2Klein
from dit.codecs.vae.hunyuan_video import Hunyuan, HunyuanVideo, HunyuanVideoI2V
from dit.codecs.vae.ltx import Ltx


class Flux(Autoencoder):
    """Images; latents are (latent - shift) * scale."""

    name: ClassVar[str] = "flux"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as FluxPipeline"
    media: ClassVar[tuple[str, ...]] = ("image",)
    default_model: ClassVar[str] = "black-forest-labs/FLUX.1-dev"
    vae: ClassVar[str] = "AutoencoderKL"
    text_encoder: ClassVar[str] = "flux"
    tuning: ClassVar[tuple[str, ...]] = ("conf/flux_lora.yaml",)
    tuning_of_edits: ClassVar[tuple[str, ...]] = ("model.name=flux1_kontext",)
    has_time: ClassVar[bool] = False
    edits_pictures: ClassVar[bool] = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """The resolution of Kontext's list whose ratio is nearest, as FluxKontextPipeline has it.

        All of them are multiples of the 16 pixels of a token.
        """
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        # Its image processor drops what is not a whole token before it takes the ratio.
        width, height = (max(16, side - side % 16) for side in (width, height))
        ratio = width / height
        _, wide, high = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        return wide, high

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        channels = config["latent_channels"]
        shift, scale = config.get("shift_factor") or 0.0, config["scaling_factor"]
        return Whitening(mean=(shift,) * channels, std=(1 / scale,) * channels)

    @property
    def stride(self) -> int:
        return 2 ** (len(self._config["block_out_channels"]) - 1)


class Sd3(Flux):
    """Images, as of FLUX, by another autoencoder."""

    name: ClassVar[str] = "sd3"
    description: ClassVar[str] = (
        "(latent - shift_factor) * scaling_factor, as StableDiffusion3Pipeline"
    )
    default_model: ClassVar[str] = "stabilityai/stable-diffusion-3-medium-diffusers"
    text_encoder: ClassVar[str] = "sd3"
    tuning: ClassVar[tuple[str, ...]] = ("conf/sd3_lora.yaml", "model.name=sd3")
    edits_pictures: ClassVar[bool] = False


class HunyuanImage(Flux):
    """Images, each token of 32 x 32 pixels; latents are latent * scale."""

    name: ClassVar[str] = "hunyuanimage"
    description: ClassVar[str] = "latent * scaling_factor, as HunyuanImagePipeline"
    default_model: ClassVar[str] = "hunyuanvideo-community/HunyuanImage-2.1-Diffusers"
    vae: ClassVar[str] = "AutoencoderKLHunyuanImage"
    text_encoder: ClassVar[str] = "hunyuanimage"
    tuning: ClassVar[tuple[str, ...]] = ("conf/hunyuanimage_lora.yaml",)
    edits_pictures: ClassVar[bool] = False

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


class Chroma(Flux):
    """Images, by the autoencoder of FLUX."""

    name: ClassVar[str] = "chroma"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as ChromaPipeline"
    default_model: ClassVar[str] = "lodestones/Chroma1-HD"
    text_encoder: ClassVar[str] = "chroma"
    tuning: ClassVar[tuple[str, ...]] = ("conf/chroma_lora.yaml",)
    edits_pictures: ClassVar[bool] = False


class Lumina2(Flux):
    """Images, by the autoencoder of FLUX."""

    name: ClassVar[str] = "lumina2"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as Lumina2Pipeline"
    default_model: ClassVar[str] = "Alpha-VLLM/Lumina-Image-2.0"
    text_encoder: ClassVar[str] = "lumina2"
    tuning: ClassVar[tuple[str, ...]] = ("conf/lumina2_lora.yaml",)
    edits_pictures: ClassVar[bool] = False


class LongCat(Flux):
    """Images, by the autoencoder of FLUX."""

    name: ClassVar[str] = "longcat"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as LongCatImagePipeline"
    default_model: ClassVar[str] = "meituan-longcat/LongCat-Image"
    text_encoder: ClassVar[str] = "longcat"
    tuning: ClassVar[tuple[str, ...]] = ("conf/longcat_lora.yaml",)
    edits_pictures: ClassVar[bool] = False


class LongCatEdit(LongCat):
    """The same, for pictures that are made of one control picture, which the text encoder sees."""

    name: ClassVar[str] = "longcat_edit"
    description: ClassVar[str] = "as longcat; text of the caption and one control picture"
    default_model: ClassVar[str] = "meituan-longcat/LongCat-Image-Edit"
    text_encoder: ClassVar[str] = "longcat_edit"
    tuning: ClassVar[tuple[str, ...]] = ("conf/longcat_lora.yaml", "model.name=longcat_image_edit")
    edits_pictures: ClassVar[bool] = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """A megapixel of this ratio in steps of 16, as LongCatImageEditPipeline has it."""
        from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import (
            calculate_dimensions,
        )

        return calculate_dimensions(1024 * 1024, width / height)


class ZImage(Flux):
    """Images, by the autoencoder of FLUX."""

    name: ClassVar[str] = "zimage"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as ZImagePipeline"
    default_model: ClassVar[str] = "Tongyi-MAI/Z-Image"
    text_encoder: ClassVar[str] = "zimage"
    tuning: ClassVar[tuple[str, ...]] = ("conf/zimage_lora.yaml",)
    edits_pictures: ClassVar[bool] = False


class HiDream(Flux):
    """Images, by the autoencoder of FLUX."""

    name: ClassVar[str] = "hidream"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as HiDreamImagePipeline"
    default_model: ClassVar[str] = "HiDream-ai/HiDream-I1-Full"
    text_encoder: ClassVar[str] = "hidream"
    tuning: ClassVar[tuple[str, ...]] = ("conf/hidream_lora.yaml",)
    edits_pictures: ClassVar[bool] = False


class OmniGen2(Flux):
    """Images, by the autoencoder of FLUX; references that its text encoder does not see."""

    name: ClassVar[str] = "omnigen2"
    description: ClassVar[str] = "(latent - shift_factor) * scaling_factor, as OmniGen2Pipeline"
    default_model: ClassVar[str] = "OmniGen2/OmniGen2"
    text_encoder: ClassVar[str] = "omnigen2"
    tuning: ClassVar[tuple[str, ...]] = ("conf/omnigen2_lora.yaml",)
    tuning_of_edits: ClassVar[tuple[str, ...]] = ("model.reference_latents=5",)

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """Whole tokens of 16 pixels, sides of at most 1024, as OmniGen2Pipeline scales down."""
        # Equal for squares but for rounding, which takes a token from the sides of some.
        ratio = min(1024 / max(width, height), (1024**2 / (width * height)) ** 0.5, 1.0)
        wide, high = (int(side * ratio) // 16 * 16 for side in (width, height))
        return max(wide, 16), max(high, 16)


class Wan(Autoencoder):
    """Images and videos of 4n + 1 frames; conditions and CLIP features for image-to-video.

    The autoencoder of Wan 2.2 5B, which cuts its pixels into patches, has 48 channels and a stride
    of 16 pixels; its model is given the clean latent of the first frame. Models of the other one
    are given `condition_latent`, as `WanImageToVideoPipeline.prepare_latents` makes it.
    """

    name: ClassVar[str] = "wan"
    description: ClassVar[str] = "(latent - mean) / std, as WanPipeline; 4n+1 frames"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    default_model: ClassVar[str] = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    default_models: ClassVar[Mapping[str, str]] = {
        "i2v": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "flf2v": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    }
    workloads: ClassVar[tuple[str, ...]] = ("t2v", "i2v", "flf2v")
    vae: ClassVar[str] = "AutoencoderKLWan"
    ratios: ClassVar[tuple[str, str]] = ("scale_factor_spatial", "scale_factor_temporal")
    image_encoder: ClassVar[str | None] = "CLIPVisionModel"
    class_tokens: ClassVar[int] = 1
    text_encoder: ClassVar[str] = "wan"
    tuning: ClassVar[tuple[str, ...]] = ("conf/wan_14b_lora.yaml", "model.name=custom")

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        codec = super().from_arguments(args)
        if codec.last_frame and codec._keeps_first_frame:
            raise CodecError(
                f"--workload_type flf2v: {codec.model_name} has the autoencoder of Wan 2.2 5B,"
                " whose model is given the first frame alone; give i2v, or the --model_name of a"
                " model with first and last frame, such as Wan 2.1 FLF2V"
            )
        return codec

    @property
    def settings(self) -> dict[str, Any]:
        # Part of the identity of a dataset: one without conditions is not continued with them.
        inputs = {"inputs": list(self.input_names)} if self.image_conditioning else {}
        return super().settings | inputs

    @property
    def _keeps_first_frame(self) -> bool:
        """Whether its models have the clean first frame in the place of the noisy one."""
        return self._config.get("patch_size") is not None

    @property
    def input_names(self) -> tuple[str, ...]:
        if self._keeps_first_frame:
            return ("first_frame_latent",)
        return ("condition_latent", *super().input_names)

    @property
    def notices(self) -> tuple[str, ...]:
        return () if self._keeps_first_frame else super().notices

    def image_inputs(
        self, first_NCHW: Tensor, last_NCHW: Tensor | None, *, frames: int
    ) -> list[dict[str, Tensor]]:
        """The inputs of `Autoencoder`, and `condition_latent` [C, F, H, W] of all frames.

        That is the latent of the given pictures with grey frames between or behind them: it
        differs from the latent of the first frame also beyond the first of its own frames.
        `image_embed` has the features of both pictures one after the other.
        """
        if self._keeps_first_frame:
            return super().image_inputs(first_NCHW, last_NCHW, frames=frames)
        samples, colours, *size = first_NCHW.shape
        video_NCFHW = first_NCHW.new_zeros(samples, colours, frames, *size)  # 0 is mid grey
        video_NCFHW[:, :, 0] = first_NCHW
        given = [first_NCHW]
        if last_NCHW is not None:
            video_NCFHW[:, :, -1] = last_NCHW
            given.append(last_NCHW)
        found = list[dict[str, Tensor]]()
        for latent in self._encode(video_NCFHW, None):
            condition = self.whitening.apply(latent)
            # Its first frame is the latent of the first picture alone: the codec is causal.
            found.append({"condition_latent": condition, "first_frame_latent": condition[:, :1]})
        if self._image_part:
            embeds = [self._image_embeds([*map(picture_of, pictures)]) for pictures in given]
            for one, *rows in zip(found, *embeds, strict=True):
                one["image_embed"] = torch.cat(rows)
        return found

    def features_of(self, answer: Any) -> Tensor:
        return answer.hidden_states[-2]


class CosmosPredict2(Wan):
    """The codec of Wan 2.1; video-to-world reads the given frames from the latent itself."""

    name: ClassVar[str] = "cosmos_predict2"
    description: ClassVar[str] = (
        "(latent - mean) / std, as Cosmos2VideoToWorldPipeline; 4n+1 frames"
    )
    default_model: ClassVar[str] = "nvidia/Cosmos-Predict2-2B-Video2World"
    workloads: ClassVar[tuple[str, ...]] = ("t2v",)
    text_encoder: ClassVar[str] = "cosmos"
    tuning: ClassVar[tuple[str, ...]] = ("conf/cosmos_predict2_2b.yaml",)


class CosmosPredict25(CosmosPredict2):
    """The same, with the text encoder of Cosmos-Predict2.5."""

    name: ClassVar[str] = "cosmos_predict25"
    description: ClassVar[str] = "as cosmos_predict2; text of all layers of Qwen2.5-VL"
    default_model: ClassVar[str] = "nvidia/Cosmos-Predict2.5-2B@diffusers/base/post-trained"
    text_encoder: ClassVar[str] = "cosmos_predict25"
    tuning: ClassVar[tuple[str, ...]] = ()


class Cosmos(Autoencoder):
    """Images and videos of 8n + 1 frames. The factor sigma_data is left to the objective."""

    name: ClassVar[str] = "cosmos"
    description: ClassVar[str] = "(latent - latents_mean) / latents_std by frame; 8n+1 frames"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    default_model: ClassVar[str] = "nvidia/Cosmos-1.0-Diffusion-7B-Text2World"
    vae: ClassVar[str] = "AutoencoderKLCosmos"
    text_encoder: ClassVar[str] = "cosmos"

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        if config.get("latents_mean") is None:
            return Whitening.identity(config["latent_channels"])
        return super().whitening_of(config)


class QwenImage(Autoencoder):
    """Images, each a clip of one frame; latents are (latent - mean) / std by channel."""

    name: ClassVar[str] = "qwen_image"
    description: ClassVar[str] = "(latent - latents_mean) / latents_std, as QwenImagePipeline"
    media: ClassVar[tuple[str, ...]] = ("image",)
    default_model: ClassVar[str] = "Qwen/Qwen-Image"
    vae: ClassVar[str] = "AutoencoderKLQwenImage"
    text_encoder: ClassVar[str] = "qwen_image"
    tuning: ClassVar[tuple[str, ...]] = ("conf/qwen_image_lora.yaml",)

    @property
    def stride(self) -> int:
        return 2 ** len(self._config["temperal_downsample"])

    @property
    def temporal_stride(self) -> int:
        return 2 ** sum(self._config["temperal_downsample"])


class QwenImageEdit(QwenImage):
    """The same, for pictures that are made of one control picture, which the text encoder sees."""

    name: ClassVar[str] = "qwen_image_edit"
    description: ClassVar[str] = "as qwen_image; text of the caption and one control picture"
    default_model: ClassVar[str] = "Qwen/Qwen-Image-Edit"
    text_encoder: ClassVar[str] = "qwen_image_edit"
    tuning: ClassVar[tuple[str, ...]] = ("conf/qwen_image_lora.yaml", "model.name=qwen_image_edit")
    edits_pictures: ClassVar[bool] = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """A megapixel of this ratio in steps of 32, as QwenImageEditPipeline has it."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        wide, high, _ = calculate_dimensions(1024 * 1024, width / height)
        return wide, high


class QwenImageEditPlus(QwenImageEdit):
    """The same, for several control pictures."""

    name: ClassVar[str] = "qwen_image_edit_2511"
    description: ClassVar[str] = "as qwen_image; text of the caption and all control pictures"
    default_model: ClassVar[str] = "Qwen/Qwen-Image-Edit-2511"
    text_encoder: ClassVar[str] = "qwen_image_edit_2511"
    tuning: ClassVar[tuple[str, ...]] = (
        "conf/qwen_image_lora.yaml",
        "model.name=qwen_image_edit_2511",
    )


class Anima(QwenImage):
    """Images, by the autoencoder of Qwen-Image."""

    name: ClassVar[str] = "anima"
    description: ClassVar[str] = "(latent - latents_mean) / latents_std, as AnimaModularPipeline"
    default_model: ClassVar[str] = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    text_encoder: ClassVar[str] = "anima"
    tuning: ClassVar[tuple[str, ...]] = ("conf/anima_lora.yaml",)


class AnimaWithStates(Anima):
    """The same, with what the conditioner reads in the place of what it makes."""

    name: ClassVar[str] = "anima_states"
    description: ClassVar[str] = "as anima; text for model.text_conditioner=trained"
    text_encoder: ClassVar[str] = "anima_states"
    tuning: ClassVar[tuple[str, ...]] = (*Anima.tuning, "model.text_conditioner=trained")


AUTOENCODERS: tuple[type[Autoencoder], ...] = (
    *(Flux, Sd3, Wan, Hunyuan, Cosmos, CosmosPredict2, CosmosPredict25),
    *(QwenImage, QwenImageEdit, QwenImageEditPlus, HunyuanImage, Chroma, HunyuanVideo),
    *(HunyuanVideoI2V, Ltx, Flux2, Flux2Klein, Lumina2, LongCat, LongCatEdit, ZImage),
    *(Anima, AnimaWithStates),
    HiDream,
    OmniGen2,
)
"""All of them; `CODECS` has the codec without weights, too."""
