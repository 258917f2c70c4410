"""Codecs of Wan, Cosmos, Qwen-Image, and families with their autoencoders, as in Diffusers."""

# N samples, C colour or latent channels, F frames, H rows, W columns, E width

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import published
from dit.codecs.vae.autoencoder import Autoencoder, picture_of

_QWEN_IMAGE21 = "diffusers.pipelines.qwenimage21.pipeline_qwenimage21"


class Wan(Autoencoder):
    """The codec of Wan: images, videos of 4n + 1 frames, and inputs of image-to-video.

    The autoencoder of Wan 2.2 5B cuts pixels into patches and has 48 channels and a stride of 16
    pixels; its network takes the clean latent of the first frame. Networks on Wan 2.1's autoencoder
    take CLIP features and `condition_latent`, as computed by
    `WanImageToVideoPipeline.prepare_latents`.
    """

    name = text_encoder = "wan"
    description = "(latent - mean) / std, as WanPipeline; 4n+1 frames"
    media = ("image", "video")
    default_model = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    default_models: ClassVar[Mapping[str, str]] = {
        "i2v": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "flf2v": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    }
    workloads = ("t2v", "i2v", "flf2v")
    vae = "AutoencoderKLWan"
    ratios = ("scale_factor_spatial", "scale_factor_temporal")
    image_encoder = "CLIPVisionModel"
    class_tokens = 1
    tuning = ("conf/wan_14b_lora.yaml", "model.name=custom")

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        codec = super().from_arguments(args)
        if codec.last_frame and codec._keeps_first_frame:
            raise CodecError(
                f"--workload_type flf2v: {codec.model_name} has the autoencoder of Wan 2.2 5B,"
                " whose model reads only the first frame; give i2v, or the --model_name of a"
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
        """Whether networks replace the noisy tokens of the first frame with its clean latent."""
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
        """The inputs of image-to-video models: for each video a dict by name, float32 on the CPU.

        `first_NCHW` and `last_NCHW` are first and last frames in [-1, 1]. Networks that take the
        first frame clean get the inputs of `Autoencoder`. Others also get `condition_latent` [C, F,
        H, W]: the latent of a clip of `frames` frames, which has the given frames and is grey
        elsewhere. Their `image_embed` has the rows of the first frame, then those of the last one
        if it is given.
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
    """The codec of Cosmos-Predict2: the autoencoder of Wan 2.1.

    Video-to-world needs no further inputs: the frames to continue are those of the latent itself.
    """

    name = "cosmos_predict2"
    description = "(latent - mean) / std, as Cosmos2VideoToWorldPipeline; 4n+1 frames"
    default_model = "nvidia/Cosmos-Predict2-2B-Video2World"
    workloads = ("t2v",)
    text_encoder = "cosmos"
    tuning = ("conf/cosmos_predict2_2b.yaml",)


class CosmosPredict25(CosmosPredict2):
    """The codec of Cosmos-Predict2.5: the VAE of Predict2, with another text encoder."""

    name = text_encoder = "cosmos_predict25"
    description = "as cosmos_predict2; text of all layers of Qwen2.5-VL"
    default_model = "nvidia/Cosmos-Predict2.5-2B@diffusers/base/post-trained"
    tuning = ()


class Cosmos(Autoencoder):
    """The codec of Cosmos: images and videos of 8n + 1 frames.

    The pipeline's factor sigma_data is applied by the objective.
    """

    name = text_encoder = "cosmos"
    description = "(latent - latents_mean) / latents_std by frame; 8n+1 frames"
    media = ("image", "video")
    default_model = "nvidia/Cosmos-1.0-Diffusion-7B-Text2World"
    vae = "AutoencoderKLCosmos"
    has_distribution = False

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        if config.get("latents_mean") is None:
            return Whitening.identity(config["latent_channels"])
        return super().whitening_of(config)


class QwenImage(Autoencoder):
    """The codec of Qwen-Image: images as clips of one frame; latents are whitened by channel."""

    name = text_encoder = "qwen_image"
    description = "(latent - latents_mean) / latents_std, as QwenImagePipeline"
    media = ("image",)
    default_model = "Qwen/Qwen-Image"
    vae = "AutoencoderKLQwenImage"
    tuning = ("conf/qwen_image_lora.yaml",)

    @property
    def stride(self) -> int:
        return 2 ** len(self._config["temperal_downsample"])

    @property
    def temporal_stride(self) -> int:
        return 2 ** sum(self._config["temperal_downsample"])


class QwenImageEdit(QwenImage):
    """Codec of Qwen-Image-Edit: Qwen-Image's; its text encoder reads one control picture."""

    name = text_encoder = "qwen_image_edit"
    description = "as qwen_image; text of the caption and one control picture"
    default_model = "Qwen/Qwen-Image-Edit"
    tuning = ("conf/qwen_image_lora.yaml", "model.name=qwen_image_edit")
    edits_pictures = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """About a megapixel with the aspect of `width` and `height`, as in QwenImageEditPipeline.

        Sides are multiples of 32 pixels.
        """
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        wide, high, _ = calculate_dimensions(1024 * 1024, width / height)
        return wide, high


class QwenImageEditPlus(QwenImageEdit):
    """Codec of Qwen-Image-Edit-2509 and 2511: Qwen-Image's, with several control pictures."""

    name = text_encoder = "qwen_image_edit_2511"
    description = "as qwen_image; text of the caption and all control pictures"
    default_model = "Qwen/Qwen-Image-Edit-2511"
    tuning = (
        "conf/qwen_image_lora.yaml",
        "model.name=qwen_image_edit_2511",
    )


class QwenImage21(Autoencoder):
    """The codec of Qwen-Image-2.1: images with transparency, latent cells of 16 x 16 pixels.

    Sides of pictures are multiples of 32.
    """

    name = text_encoder = "qwen_image21"
    description = "(latent - latents_mean) / latents_std, as QwenImage21Pipeline; RGBA"
    media = ("image",)
    default_model = "Qwen/Qwen-Image-2.1"
    vae = "AutoencoderKLQwenImage21"
    ratios = ("scale_factor_spatial", "scale_factor_temporal")
    patch = 1
    side_cells = 2
    tuning = ("conf/qwen_image21_lora.yaml",)
    tuning_of_edits = ("model.reference_latents=1",)
    edits_pictures = True

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """About a megapixel with the aspect of `width` and `height`, as in QwenImage21Pipeline.

        Sides are multiples of 32 pixels.
        """
        scaled = published(f"{_QWEN_IMAGE21}:calculate_dimensions")
        wide, high, _ = scaled(1024 * 1024, width / height)
        return wide, high

    @property
    def pixel_channels(self) -> int:
        return self._config["in_channels"]

    @property
    def notices(self) -> tuple[str, ...]:
        return (
            "pictures are encoded as RGBA: those without transparency with alpha 1, and those"
            " with it as they are, without --background",
        )

    def _distribution(self, video_NCFHW: Tensor) -> tuple[Tensor, Tensor | None]:
        missing = self.pixel_channels - video_NCFHW.shape[1]
        opaque_NCFHW = pad(video_NCFHW, (0, 0) * 3 + (0, missing), value=1.0)
        return super()._distribution(opaque_NCFHW)


class Anima(QwenImage):
    """The codec of Anima: images, by Qwen-Image's autoencoder."""

    name = text_encoder = "anima"
    description = "(latent - latents_mean) / latents_std, as AnimaModularPipeline"
    default_model = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    tuning = ("conf/anima_lora.yaml",)


class Krea2(QwenImage):
    """The codec of Krea 2: images, by Qwen-Image's autoencoder."""

    name = text_encoder = "krea2"
    description = "(latent - latents_mean) / latents_std, as Krea2Pipeline"
    default_model = "krea/Krea-2-Raw"
    tuning = ("conf/krea2_lora.yaml",)


class AnimaWithStates(Anima):
    """The codec of Anima for shards with the inputs of the text conditioner, not its outputs."""

    name = text_encoder = "anima_states"
    description = "as anima; text for model.text_conditioner=trained"
    tuning = (*Anima.tuning, "model.text_conditioner=trained")
