"""Text encoders of the first HunyuanVideo, by functions of its pipelines.

The language model reads an instruction followed by the caption; the instruction's rows are dropped,
and CLIP-L's pooled output is added. It is Llama for text-to-video. For image-to-video it is Llava,
which also reads the first frame, whose rows precede those of the caption.
"""

# L tokens, E width of the embedding, P that of the pooled text

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import load, model_config_of
from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder, as_stored

_PICTURE_ROWS = 576  # that Llava makes of a picture: 24 x 24 patches
_BEHIND = 4  # tokens of the instruction behind a caption, which the pipeline cuts out of its rows
INTERLEAVE = {"token_replace": 4, "latent_concat": 2}
"""Interval of a picture's rows that the pipeline keeps, by the network's `image_condition_type`."""


class HunyuanVideoText(PretrainedTextEncoder):
    """Text encoders of HunyuanVideo: Llama on an instruction with the caption, and CLIP-L."""

    name = "hunyuanvideo"
    network = "LlamaModel"
    model_type = "llama"
    default_model = "hunyuanvideo-community/HunyuanVideo"
    default_length = 256

    remedy = (
        "text encoder 'hunyuanvideo' reads captions alone, with Llama: give such a folder, or"
        " --processor hunyuanvideo_i2v to prepare data for image-to-video"
    )
    """Advice in the message about a folder with another network."""

    @property
    def width(self) -> int:  # type: ignore[override] # the model's configuration has it
        self._check_network()
        return super().width

    def embed(self, caption: str) -> dict[str, Tensor]:
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import HunyuanVideoPipeline

        return self._encoded_by(self._around(HunyuanVideoPipeline), prompt=caption)

    def _around(self, kind: Any, **more: Any) -> Any:
        self._check_network()
        return self.pipeline_of(
            kind,
            **more,
            text_encoder_2=self.load_network("CLIPTextModel", "text_encoder_2"),
            tokenizer_2=self.load_tokenizer("tokenizer_2"),
        )

    def _encoded_by(self, pipe: Any, **given: Any) -> dict[str, Tensor]:
        text_1LE, pooled_1P, mask_1L = pipe.encode_prompt(
            **given, device=torch.device(self.device), max_sequence_length=self.max_length
        )
        return {"text": text_1LE[mask_1L.bool()], "pooled_text": pooled_1P[0]}

    def _check_network(self) -> None:
        """Checks the network of the pipeline's folder.

        Raises:
            CodecError: its type is not `model_type`.
        """
        folder = self.subfolders[0]
        kind = load(self._part("AutoConfig", folder)).model_type
        if kind != self.model_type:
            raise CodecError(
                f"--model_name {self.model_name}: its {folder} is of type {kind!r}, not"
                f" {self.model_type!r}; {self.remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoImageText(HunyuanVideoText):
    """Text encoders of HunyuanVideo I2V: Llava on first frame and caption, and CLIP-L.

    A caption without a frame is a negative prompt: the pipeline encodes it with a black picture,
    and always keeps every second row of this picture.
    """

    name = "hunyuanvideo_i2v"
    network = "LlavaForConditionalGeneration"
    model_type = "llava"
    default_model = "hunyuanvideo-community/HunyuanVideo-I2V"
    options = HunyuanVideoText.options | {"image_embed_interleave"}
    sees_first_frame = True
    remedy = (
        "text encoder 'hunyuanvideo_i2v' sees the first frame, with Llava: give such a folder, as"
        f" of {default_model}, or --processor hunyuanvideo for texts of captions alone"
    )

    image_embed_interleave: int = 2
    """Interval n of a first frame's rows: the first of each n rows is kept."""

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        return super().from_arguments(args)._keeping(getattr(args, "image_embed_interleave", None))

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return super().from_settings(settings)._keeping(settings.get("image_embed_interleave"))

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"image_embed_interleave": self.image_embed_interleave}

    def rows_of(self, caption: str) -> int:
        return super().rows_of(caption) + _PICTURE_ROWS // self.image_embed_interleave

    def count(self, caption: str) -> int:
        return super().count(caption) + _BEHIND

    def embed(self, caption: str) -> dict[str, Tensor]:
        black = Image.new("RGB", (64, 64))  # of any size: the image processor scales it
        return self._encoded_by(self.pipeline, prompt=caption, image=black)

    def encode_beside(self, caption: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """`text` [L, E] and `pooled_text` [P] of `caption` with the first frame in `pictures`."""
        (first,) = pictures
        kept = {"image_embed_interleave": self.image_embed_interleave}
        with torch.inference_mode():
            return as_stored(self._encoded_by(self.pipeline, prompt=caption, image=first, **kept))

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoders and no other component."""
        from diffusers.pipelines.hunyuan_video import (
            pipeline_hunyuan_video_image2video as image_to_video,
        )

        processor = load(self._part("AutoImageProcessor", "image_processor"))
        return self._around(
            image_to_video.HunyuanVideoImageToVideoPipeline, image_processor=processor
        )

    def _keeping(self, interleave: int | None) -> Self:
        """A copy that keeps the first of each `interleave` rows of a picture.

        With None the interval is that of the network in the folder.

        Raises:
            CodecError: the folder does not say which network it has, or has another one.
        """
        if interleave is None:
            self._check_network()
            kind = "HunyuanVideoTransformer3DModel"
            part = replace(self._part(kind, "transformer"), library="diffusers")
            try:
                shown = model_config_of(part).get("image_condition_type")
            except CodecError:
                shown = None
            if shown not in INTERLEAVE:
                raise CodecError(
                    f"--model_name {self.model_name}: no transformer/config.json there has the"
                    f" image_condition_type {' or '.join(INTERLEAVE)}, which determines how"
                    " many rows of a first frame the network reads; give the folder of a whole"
                    " HunyuanVideoImageToVideoPipeline, or --image_embed_interleave: 4 for"
                    " HunyuanVideo-I2V, 2 for its 33-channel form"
                )
            interleave = INTERLEAVE[shown]
        return replace(self, image_embed_interleave=interleave)
