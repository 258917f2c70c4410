"""FLUX.3 klein: texts against Diffusers' modular pipeline; its codec is that of FLUX.2."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from dit.codecs.dataset_card import CodecError
from tests.families import encoding, flux3

CAPTIONS = ["a red bird on a roof", "", "x" * 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flux3.encoders(tmp_path_factory.mktemp("flux3"))


@pytest.mark.parametrize("length", [None, 100])
def test_texts_are_those_of_the_pipeline(folder: Path, length: int | None) -> None:
    """Whole windows of 80 rows, those of padding too, up to the longest."""
    ours = encoding.encoder("flux3_klein", folder, max_sequence_length=length)
    letters: Any = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    network = Qwen3VLForConditionalGeneration.from_pretrained(folder, subfolder="text_encoder")
    steps = SequentialPipelineBlocks.from_blocks_dict({"text": Flux3TextEncoderStep()})
    pipe: Any = steps.init_pipeline()
    reads = SimpleNamespace(tokenizer=letters, apply_chat_template=letters.apply_chat_template)
    block = Flux3TextEncoderStep()._get_qwen3_vl_prompt_embeds
    assert (ours.width, ours.max_length) == (128, length or 8192) and pipe is not None
    for caption in CAPTIONS:
        with torch.no_grad():
            expected = block(network.eval(), reads, caption, max_sequence_length=length or 8192)[0]
        found = ours.embed(caption)["text"]
        tokens = ours.count(caption)
        assert len(found) == min(-(-tokens // 80) * 80, length or 8192)
        assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5
        assert ours.is_cut(caption) == (length is not None and caption == CAPTIONS[2])
    encoding.check_card(ours)
    assert ours.settings["padding"] == "keep"


def test_longer_texts_than_the_pipeline_takes_are_refused(folder: Path) -> None:
    with pytest.raises(CodecError, match=r"max_sequence_length 9000: .*'flux3_klein' take at most"):
        encoding.encoder("flux3_klein", folder, max_sequence_length=9000)


def test_latents_and_references_are_those_of_the_pipeline(folder: Path) -> None:
    """Several references: each below a megapixel, cropped to whole tokens."""
    from diffusers import AutoencoderKLFlux2

    model = encoding.codec("flux3_klein", folder)
    shown = torch.rand(3, 1, 28, 20, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step = SequentialPipelineBlocks.from_blocks_dict({"encode": Flux3VaeEncoderStep()})
    pipe: Any = step.init_pipeline()
    pipe.update_components(vae=AutoencoderKLFlux2.from_pretrained(folder, subfolder="vae"))
    (expected,) = pipe(condition_images=[shown[:, 0][None]], output="image_cond_latents")
    found = model.whitening.apply(model.encode_raw(shown))
    assert (found[:, 0] - expected[0]).abs().max() < 1e-5
    for size in ((64, 64), (1000, 700), (2000, 1500), (1031, 1020), (640, 4999)):
        resized = Flux3ImageProcessor._resize_if_exceeds_area(Image.new("L", size), 1024**2).size
        assert model.reference_size(*size) == resized
