"""Texts of Z-Image are its pipeline's; levels of its samplers, too; what runs on it are told."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from transformers import AutoTokenizer, Qwen3Model

from tests.families import encoding, pipeline_parts

CAPTIONS = ["a red bird on a roof", "", "x" * 600]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """All of them are a chat whose answer has begun, the empty caption, too."""
    folder = pipeline_parts.zimage(tmp_path)
    ours = encoding.encoder("zimage", folder)
    assert (ours.width, ours.max_length) == (16, 512)
    network = Qwen3Model.from_pretrained(folder, subfolder="text_encoder").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    pipe = ZImagePipeline(None, None, network, letters, None)  # type: ignore[arg-type]
    for caption in CAPTIONS:
        with torch.no_grad():
            (rows,), (null,) = pipe.encode_prompt(caption, negative_prompt=caption)
        own = ours.encode(caption)
        assert torch.equal(own, rows.bfloat16()) and len(own)
        assert torch.equal(ours.encode_negative(caption)["text"], null.bfloat16())
        assert min(ours.count(caption), 512) == len(own)
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    encoding.check_card(ours)
