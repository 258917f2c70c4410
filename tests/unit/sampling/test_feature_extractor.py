"""Networks that turn pictures into features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
)

from dit.sampling.validation.feature_extractor import FeatureExtractor
from tests.families.pipeline_parts import randomized, tokenizer

CPU = torch.device("cpu")
SIZES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
PICTURES = [np.full((40, 50, 3), 90, np.uint8), np.full((20, 10, 3), 200, np.uint8)]


def test_clip_gives_features_of_pictures_and_captions(tmp_path):
    tiny = {**TINY, "num_attention_heads": 2}
    vision = {**tiny, "image_size": 32, "patch_size": 16}
    words = {**tiny, "vocab_size": 98, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    model = randomized(
        CLIPModel(CLIPConfig(vision_config=vision, text_config=words, projection_dim=8))
    )
    model.save_pretrained(tmp_path)
    processor = CLIPProcessor(CLIPImageProcessor(**SIZES), tokenizer(length=32))
    processor.save_pretrained(tmp_path)
    found = FeatureExtractor(str(tmp_path), CPU)
    assert found.reads_captions
    texts = ["a cat", "a longer caption"]
    given = processor(text=texts, images=PICTURES, return_tensors="pt", padding=True)
    with torch.no_grad():
        answer = model(**given)
    cosine = torch.nn.functional.cosine_similarity
    for ours, theirs in (
        (found.pictures(PICTURES), answer.image_embeds),
        (found.captions(texts), answer.text_embeds),
    ):
        assert ours.shape == (2, 8)
        assert torch.allclose(cosine(ours, theirs), torch.ones(2), atol=1e-5)


def test_a_vision_model_gives_its_pooled_output(tmp_path):
    config = CLIPVisionConfig(**TINY, num_attention_heads=2, image_size=32, patch_size=16)
    model = randomized(CLIPVisionModel(config))
    model.save_pretrained(tmp_path)
    processor = CLIPImageProcessor(**SIZES)
    processor.save_pretrained(tmp_path)
    found = FeatureExtractor(str(tmp_path), CPU)
    assert not found.reads_captions
    with torch.no_grad():
        expected = model(**processor(images=PICTURES, return_tensors="pt")).pooler_output
    assert torch.allclose(found.pictures(PICTURES), expected, atol=1e-5)


def test_a_network_that_is_not_there_is_named(tmp_path):
    for name in (tmp_path / "inception.pt", "nobody/nothing"):
        with pytest.raises(ValueError, match="name a TorchScript file") as raised:
            FeatureExtractor(str(name), CPU)
        assert str(name) in str(raised.value)
