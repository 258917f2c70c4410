"""Texts of OmniGen2 are its pipeline's, and so are levels and sizes of references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dit.codecs import vae
from tests.families import encoding, pipeline_parts

CAPTIONS = ["a red bird on a roof", "", "x" * 1200]
SYSTEM = (
    "You are a helpful assistant that generates high-quality images based on user instructions."
)


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """All of them are a chat without the answer's beginning, the empty caption, too."""
    folder = pipeline_parts.omnigen2(tmp_path)
    ours = encoding.encoder("omnigen2", folder)
    assert (ours.width, ours.max_length) == (16, 1024)
    network = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, subfolder="mllm").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="processor")
    for caption in CAPTIONS:
        turns = f"system:{SYSTEM};user:{caption};"
        ids = letters([turns], max_length=1024, truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            rows = network(ids, output_hidden_states=True).hidden_states[-1][0]
        own = ours.encode(caption)
        assert torch.equal(own, rows.bfloat16())
        assert torch.equal(ours.encode_negative(caption)["text"], own)
        assert min(ours.count(caption), 1024) == len(own)
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    encoding.check_card(ours)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((640, 480), (640, 480)),
        ((700, 500), (688, 496)),
        ((3000, 1000), (1024, 336)),
        ((1070, 1070), (1008, 1008)),
    ],
)
def test_references_are_made_smaller_alone(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    codec = vae.codec_named("omnigen2")
    assert codec.reference_size(*size) == wanted  # type: ignore[attr-defined]
    assert codec.edits_pictures
