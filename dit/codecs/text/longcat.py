"""Text encoders of LongCat-Image and its edit model, by functions of their pipelines.

Both are Qwen2.5-VL on an instruction and the caption; text in quotation marks is tokenised
character by character. Captions are padded to `max_length` tokens, and the networks attend to all
of these; rows of the instruction are dropped. The edit model's encoder also reads the picture.
"""

# L tokens, M those of the empty caption, E width of the embedding

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import load
from dit.codecs.text.pretrained_encoder import WholeTextEncoder, as_stored

_INNER = "\ue000"
"""A character that replaces the apostrophe in words. If a text has two words such as `don't` and
`it's`, the pipelines may exchange them, in an order that each process draws anew; with this
character they find no such word."""
_PICTURE_ROWS = 1400 // 4  # of a quarter of a megapixel, about: one for 28 x 28 pixels


class _Apostrophes:
    """A tokenizer that reads the character `_INNER` as an apostrophe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text.replace(_INNER, "'"), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class LongCatText(WholeTextEncoder):
    """Text encoder of LongCat-Image: Qwen2.5-VL; rows of the instruction are dropped."""

    name = "longcat"
    network = "Qwen2_5_VLForConditionalGeneration"
    default_model = "meituan-longcat/LongCat-Image"

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoder, without the part that rewrites prompts."""
        from diffusers.pipelines.longcat_image.pipeline_longcat_image import LongCatImagePipeline

        return self._whole(self.pipeline_of(LongCatImagePipeline, text_processor=None))

    def _whole(self, pipe: Any) -> Any:
        pipe.tokenizer_max_length = self.max_length
        return pipe

    def load_tokenizer(self, subfolder: str) -> Any:
        return _Apostrophes(super().load_tokenizer(subfolder))

    def clean(self, caption: str) -> str:
        return re.sub("[a-zA-Z]+'[a-zA-Z]+", lambda word: word[0].replace("'", _INNER), caption)

    def count(self, caption: str) -> int:
        from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

        tokenizer = self.load_tokenizer(self.subfolders[1])
        parts = [
            one
            for text, quoted in split_quotation(self.clean(caption))
            for one in (text if quoted else [text])
        ]
        return sum(
            len(tokenizer(one, add_special_tokens=False, verbose=False).input_ids) for one in parts
        )

    def embed(self, caption: str) -> dict[str, Tensor]:
        rows_1LE, _ = self.pipeline.encode_prompt(self.clean(caption))
        return {"text": rows_1LE[0]}


class LongCatEditText(LongCatText):
    """Text encoder of LongCat-Image-Edit, which also reads a picture before the caption.

    The picture is resized to about a quarter of a megapixel.
    """

    name = "longcat_edit"
    default_model = "meituan-longcat/LongCat-Image-Edit"
    most_pictures = 1
    reads_alone = False

    @property
    def pipeline(self) -> Any:
        from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import (
            LongCatImageEditPipeline,
        )

        processor = self.load_processor()
        return self._whole(self.pipeline_of(LongCatImageEditPipeline, text_processor=processor))

    def load_processor(self) -> Any:
        """The processor that makes the network's inputs of pictures.

        Raises:
            CodecError: the processor cannot be loaded, as when torchvision is missing.
        """
        return load(self._part("Qwen2VLProcessor", "text_processor"))

    def rows_of(self, caption: str) -> int:
        return super().rows_of(caption) + _PICTURE_ROWS

    def embed(self, caption: str) -> dict[str, Tensor]:
        raise CodecError(
            f"text encoder {self.name!r} reads a caption together with the picture to edit,"
            f" and got only {caption!r}; give that picture as well"
        )

    def encode_beside(self, caption: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The embeddings `text` [L, E] of `caption` and `null_text` [M, E] of the empty caption.

        Both are encoded with the only picture in `pictures`.
        """
        (picture,) = pictures
        with torch.inference_mode():
            pipe = self.pipeline
            shown = _shown(pipe, picture)
            each = {"text": self.clean(self._cut(caption)), "null_text": ""}
            found = {name: pipe.encode_prompt(words, shown)[0][0] for name, words in each.items()}
            return as_stored(found)

    def _cut(self, caption: str) -> str:
        """The part of `caption` that the encoder reads; the pipeline fails on longer captions."""
        if not self.is_cut(caption):
            return caption
        ends = range(len(caption))
        return caption[
            : bisect_right(ends, self.max_length, key=lambda end: self.count(caption[:end])) - 1
        ]


def _shown(pipe: Any, picture: Image.Image) -> Image.Image:
    """`picture`, resized as `LongCatImageEditPipeline` resizes it for the text encoder."""
    from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import calculate_dimensions

    width, height = calculate_dimensions(1024 * 1024, picture.width / picture.height)
    whole = pipe.image_processor.resize(picture, height, width)
    return pipe.image_processor.resize(whole, height // 2, width // 2)
