"""Texts of OmniGen2 are its pipeline's, and so are levels and sizes of references."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dit.codecs import text, vae
from dit.config_loading import load_config
from dit.objectives.registry import sampling_path
from recipes.runs import dit_debug
from tests.families import pipeline_parts

CAPTIONS = ["a red bird on a roof", "", "x" * 1200]
SYSTEM = (
    "You are a helpful assistant that generates high-quality images based on user instructions."
)


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """All of them are a chat without the answer's beginning, the empty caption, too."""
    folder = pipeline_parts.omnigen2(tmp_path)
    given = {"model_name": str(folder), "precision": "float32", "max_sequence_length": None}
    given |= {"t5_cache_dir": None, "tokenizer_cache_dir": None}
    ours: Any = text.text_encoder_named("omnigen2").from_arguments(Namespace(**given))
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
    assert text.text_encoder_of_card({"format_version": 1, "text_encoder": ours.settings}) == ours


@pytest.mark.parametrize("num_steps", [1, 8, 28])
@pytest.mark.parametrize("sides", [(40, 40), (128, 128), (96, 160)])
def test_levels_are_those_of_the_pipeline(num_steps: int, sides: tuple[int, int]) -> None:
    """Its times run from noise, 0, to data; sides are those of the latent."""
    words = ["model.name=omnigen2", "dataset.task_encoder_seq_length=32768"]
    path = sampling_path(load_config(dit_debug(), overrides=words).objective)
    even, shift = np.linspace(0, 1, num_steps + 1), np.sqrt(sides[0] * sides[1]) / 40
    times = even / (shift - shift * even + even)
    found = path.schedule([sides[0] * sides[1] // 4], num_steps=num_steps)[:, 0]
    np.testing.assert_allclose(found.double().numpy(), 1 - times, rtol=1e-5, atol=1e-6)


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
    assert codec.text_encoder == "omnigen2" and codec.edits_pictures
