"""Text encoders of Qwen-Image, its edit models, Qwen-Image-2.1, HunyuanImage and Krea 2.

Their outputs equal those of the pipelines. All are Qwen2.5-VL or Qwen3-VL on an instruction and the
caption; the rows of the instruction before the caption are dropped. Edit models also read the
pictures to be edited, so each sample has its own embedding of the empty caption. HunyuanImage adds
ByT5.
"""

# L tokens, G tokens of words in quotation marks, E width of the embedding, S slots of pictures

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import load, published
from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder, as_stored

_PICTURE_TOKENS = 1400  # of a megapixel, about: one for 28 x 28 pixels
_MEGAPIXEL = 1024 * 1024
_KREA2 = "diffusers.pipelines.krea2.pipeline_krea2:Krea2Pipeline"
_QWEN_IMAGE21 = "diffusers.pipelines.qwenimage21.pipeline_qwenimage21:QwenImage21Pipeline"
_KREA2_LAYERS = 12  # whose states are joined, as the pipeline chooses them


class QwenImageText(PretrainedTextEncoder):
    """The text encoder of Qwen-Image: Qwen2.5-VL on captions, whose padding is dropped."""

    name = "qwen_image"
    network = "Qwen2_5_VLForConditionalGeneration"
    default_model = "Qwen/Qwen-Image"
    longest_text = 1024  # as QwenImagePipeline says
    rows_after = 5  # of the instruction behind a caption, which are attended to

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoder and no other component."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline

        return self.pipeline_of(QwenImagePipeline)

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.rows_after

    def count(self, caption: str) -> int:
        """Number of rows of the uncut `caption` and of the instruction's end behind it."""
        pipe, tokenizer = self.pipeline, self.load_tokenizer(self.subfolders[1])
        whole = tokenizer(pipe.prompt_template_encode.format(caption), verbose=False).input_ids
        return len(whole) - pipe.prompt_template_encode_start_idx

    def embed(self, caption: str) -> dict[str, Tensor]:
        device = torch.device(self.device)
        rows_1LE, _ = self.pipeline.encode_prompt(
            caption, device, max_sequence_length=self.max_length
        )
        return {"text": rows_1LE[0]}


class Krea2Text(QwenImageText):
    """The text encoder of Krea 2: states of twelve layers of Qwen3-VL, concatenated.

    The padding, which comes before the end of the instruction, is dropped.
    """

    name = "krea2"
    network = "Qwen3VLModel"
    default_model = "krea/Krea-2-Raw"
    longest_text = None

    @property
    def pipeline(self) -> Any:
        return self.pipeline_of(published(_KREA2))

    @property
    def width(self) -> int:  # type: ignore[override]
        return _KREA2_LAYERS * super().width

    def count(self, caption: str) -> int:
        pipe, tokenizer = self.pipeline, self.load_tokenizer(self.subfolders[1])
        begun = tokenizer(pipe.prompt_template_encode_prefix + caption, verbose=False).input_ids
        return len(begun) - pipe.prompt_template_encode_start_idx + self.rows_after

    def embed(self, caption: str) -> dict[str, Tensor]:
        device = torch.device(self.device)
        made = self.pipeline.get_text_hidden_states(caption, self.max_length, device)
        rows_1LSE, mask_1L = made
        return {"text": rows_1LSE[mask_1L].flatten(1)}


class HunyuanImageText(QwenImageText):
    """The text encoder of HunyuanImage: Qwen-Image's, and ByT5 on words in quotation marks.

    Its instruction has no end after the caption.
    """

    name = "hunyuanimage"
    default_model = "hunyuanvideo-community/HunyuanImage-2.1-Diffusers"
    default_length = 1000
    # The network's positions; the pipeline itself has 1000.
    longest_text = 2**15
    rows_after = 1

    @property
    def pipeline(self) -> Any:
        from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import HunyuanImagePipeline

        pipe = self.pipeline_of(
            HunyuanImagePipeline,
            text_encoder_2=self.load_network("T5EncoderModel", "text_encoder_2"),
            tokenizer_2=self.load_tokenizer("tokenizer_2"),
        )
        pipe.tokenizer_max_length = self.max_length
        return pipe

    def embed(self, caption: str) -> dict[str, Tensor]:
        made = self.pipeline.encode_prompt(caption, torch.device(self.device))
        text_1LE, mask_1L, glyphs_1GE, glyph_mask_1G = made
        # Masks hide all padding, and all rows of ByT5 where nothing is quoted.
        return {"text": text_1LE[mask_1L.bool()], "text_2": glyphs_1GE[glyph_mask_1G.bool()]}


class QwenImageEditText(QwenImageText):
    """Text encoder of Qwen-Image-Edit: Qwen2.5-VL on the caption and one picture of a megapixel."""

    name = "qwen_image_edit"
    default_model = "Qwen/Qwen-Image-Edit"
    most_pictures = 1
    reads_alone = False

    @property
    def pipeline(self) -> Any:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import QwenImageEditPipeline

        return self.pipeline_of(QwenImageEditPipeline, processor=self.load_processor())

    def load_processor(self) -> Any:
        """The processor that makes the network's inputs of captions and pictures.

        Raises:
            CodecError: the processor cannot be loaded, as when torchvision is missing.
        """
        return load(self._part("Qwen2VLProcessor", "processor"))

    def rows_of(self, caption: str) -> int:
        return self.length_of(caption) + self.most_pictures * _PICTURE_TOKENS

    def is_cut(self, caption: str) -> bool:
        """Always False: captions are not cut, because the pictures' rows come before them."""
        del caption
        return False

    def embed(self, caption: str) -> dict[str, Tensor]:
        raise CodecError(
            f"text encoder {self.name!r} reads a caption together with the picture to edit,"
            f" and got only {caption!r}; give that picture as well"
        )

    def encode_beside(self, caption: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The embeddings `text` [L, E] of `caption` and `null_text` [M, E] of the empty caption.

        Both are encoded with the same pictures.
        """
        with torch.inference_mode():
            pipe = self.pipeline
            shown = self.shown(pipe, pictures)
            device = torch.device(self.device)
            each = {"text": caption, "null_text": ""}
            found = {
                name: pipe.encode_prompt(words, shown, device)[0][0] for name, words in each.items()
            }
            return as_stored(found)

    def shown(self, pipe: Any, pictures: Sequence[Image.Image]) -> Any:
        """The only picture, resized as `QwenImageEditPipeline` resizes it for the text encoder."""
        (picture,) = pictures
        return _scaled(pipe, picture, _MEGAPIXEL)


class QwenImageEditPlusText(QwenImageEditText):
    """Text encoder of Qwen-Image-Edit-2509 and 2511: several numbered pictures at a small size."""

    name = "qwen_image_edit_2511"
    default_model = "Qwen/Qwen-Image-Edit-2511"
    most_pictures = 64

    @property
    def pipeline(self) -> Any:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        processor = self.load_processor()
        return self.pipeline_of(plus.QwenImageEditPlusPipeline, processor=processor)

    def rows_of(self, caption: str) -> int:
        return self.length_of(caption) + _PICTURE_TOKENS // 7  # one picture of 384 x 384 pixels

    def shown(self, pipe: Any, pictures: Sequence[Image.Image]) -> Any:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE

        return [_scaled(pipe, picture, CONDITION_IMAGE_SIZE) for picture in pictures]


class QwenImage21Text(QwenImageText):
    """The text encoder of Qwen-Image-2.1: the last states of Qwen3-VL, before its final norm.

    It reads up to ten pictures of about a megapixel, which the chat lists before the caption.
    """

    name = "qwen_image21"
    network = "Qwen3VLForConditionalGeneration"
    default_model = "Qwen/Qwen-Image-2.1"
    subfolders = ("text_encoder", "processor")
    default_length = 1024
    longest_text = 8192  # places that Diffusers' network has angles for
    rows_after = 12  # of the chat around a caption
    most_pictures = 10
    sees_alpha = True  # scaled first, then put on white

    @property
    def pipeline(self) -> Any:
        return self._pipeline(_TextHalf(self.load_tokenizer(self.subfolders[1])))

    def _pipeline(self, processor: Any) -> Any:
        pipeline = published(_QWEN_IMAGE21)
        network = self.load_network(self.network, self.subfolders[0])
        parts = {"text_encoder": network, "processor": processor}
        return self.pipeline_of(pipeline, **parts)

    def load_processor(self) -> Any:
        """The processor that makes the network's inputs of captions and pictures.

        Raises:
            CodecError: the processor cannot be loaded, as when torchvision is missing.
        """
        return load(self._part("Qwen3VLProcessor", "processor"))

    def count(self, caption: str) -> int:
        pipe, tokenizer = self.pipeline, self.load_tokenizer(self.subfolders[1])
        chat = pipe.prompt_template_t2i.format(caption or " ")
        return len(tokenizer(chat, verbose=False).input_ids) - pipe._drop_idx

    def embed(self, caption: str) -> dict[str, Tensor]:
        rows_1LE, _, _ = self.pipeline.encode_prompt(self.cut(caption), device=self.device)
        return {"text": rows_1LE[0]}

    def cut(self, caption: str) -> str:
        """`caption`, cut so that it has at most `max_length` tokens with the chat around it.

        At least one token of the caption is kept. The pipeline itself does not cut.
        """
        tokenizer = self.load_tokenizer(self.subfolders[1])
        tokens = tokenizer(caption, add_special_tokens=False, verbose=False).input_ids
        most = self.max_length - self.rows_after
        return caption if len(tokens) <= most else tokenizer.decode(tokens[: max(most, 1)])

    def encode_beside(self, caption: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The tensors of a caption with pictures, which split the text of the chat into parts.

        `text_before_0`, `text_before_1`, ... [L, E] are the rows before each picture, `text` [L, E]
        those after the last picture, and `null_text` the latter for the empty caption. The
        encoder's rows of pictures are left out, as the network has latents in their place. The
        caption is at the end of the chat, so the parts before pictures do not depend on it.
        """
        with torch.inference_mode():
            pipe = self._pipeline(self.load_processor())
            shown = [_scaled(pipe, picture, _MEGAPIXEL) for picture in pictures]
            *before, text = self._parts(pipe, self.cut(caption), shown)
            *_, null = self._parts(pipe, "", shown)
            found = {f"text_before_{number}": rows for number, rows in enumerate(before)}
            return as_stored(found | {"text": text, "null_text": null})

    def _parts(self, pipe: Any, caption: str, shown: list[Image.Image]) -> list[Tensor]:
        """Hidden states of a chat, split at its pictures, whose own states are left out."""
        rows_1LE, _, is_slot_1L = pipe.encode_prompt(caption, shown, torch.device(self.device))
        ends = is_slot_1L[0].int().diff(prepend=is_slot_1L.new_zeros(1).int()).nonzero().flatten()
        parts = rows_1LE[0].tensor_split(ends.tolist())
        assert len(parts) == 2 * len(shown) + 1, "slots of each picture are apart"
        return [*parts[::2]]


class _TextHalf:
    """The text part of the published processor, which does not need torchvision."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, *, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def apply_chat_template(self, chat: Any, **options: Any) -> list[list[int]]:
        return [self.tokenizer.apply_chat_template(chat, **options)]


def _scaled(pipe: Any, picture: Image.Image, area: int) -> Image.Image:
    """`picture`, resized to about `area` pixels as the pipelines of the edit models do."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    width, height, _ = calculate_dimensions(area, picture.width / picture.height)
    return pipe.image_processor.resize(picture, height, width)
