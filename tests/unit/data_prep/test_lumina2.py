"""Texts of Lumina Image 2.0 are its pipeline's; levels of its samplers, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.pipelines.lumina2.pipeline_lumina2 import Lumina2Pipeline
from transformers import AutoTokenizer, Gemma2Model

from dit.codecs.dataset_card import CodecError
from dit.config_loading import ConfigError, load_config
from recipes.runs import dit_debug
from tests.families import encoding, pipeline_parts

CAPTIONS = ["a red bird on a roof", "", "x" * 120]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """Captions behind the instruction, negative prompts and the empty caption without it."""
    folder = pipeline_parts.lumina2(tmp_path)
    ours = encoding.encoder("lumina2", folder)
    assert (ours.width, ours.max_length) == (16, 256)
    network = Gemma2Model.from_pretrained(folder, subfolder="text_encoder").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    pipe = Lumina2Pipeline(None, None, None, network, letters)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"--max_sequence_length 300.* at most 299"):
        encoding.encoder("lumina2", folder, max_sequence_length=300)
    for caption in CAPTIONS:
        with torch.no_grad():
            rows, mask, null, null_mask = pipe.encode_prompt(caption, negative_prompt=caption)
        own, wanted = ours.encode(caption), rows[mask.bool()]
        if not caption:  # the null text of a dataset is the pipeline's negative prompt
            wanted = null[null_mask.bool()]
        negative = ours.encode_negative(caption)["text"]
        assert torch.equal(negative, null[null_mask.bool()].bfloat16())
        assert torch.equal(own, wanted.bfloat16())
        assert min(ours.count(caption), 256) == len(own)
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    encoding.check_card(ours)


def test_pictures_are_no_larger_than_the_tables_of_diffusers_network() -> None:
    words = ["model.name=lumina2", "dataset.mock=true", "dataset.task_encoder_seq_length=8192"]
    sides = "frames: 1, height: 2, text_length: 1, width:"
    load_config(dit_debug(), overrides=[*words, f"dataset.mock_samples=[{{{sides} 1024}}]"])
    with pytest.raises(ConfigError, match=r"exceeds the largest latent .* 1024, 1024"):
        load_config(dit_debug(), overrides=[*words, f"dataset.mock_samples=[{{{sides} 1026}}]"])
