"""Texts of LongCat-Image and of its edit model are their pipelines'; levels of samplers, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.longcat_image import pipeline_longcat_image
from diffusers.pipelines.longcat_image.pipeline_longcat_image import (
    LongCatImagePipeline,
)
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import LongCatImageEditPipeline
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dit.codecs import vae
from dit.codecs.dataset_card import CodecError
from dit.codecs.text.longcat import LongCatEditText
from tests.families import encoding, pipeline_parts, stand_ins

SIGN = "<|vision_end|>"
"""One token, and characters where it is quoted."""
CAPTIONS = [f"{SIGN} says \"no {SIGN}\" & it's 'ok'", "", "x" * 600]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_parts.longcat(tmp_path_factory.mktemp("longcat"))


def _pipeline(kind: Any, folder: Path) -> Any:
    network = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, subfolder="text_encoder")
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    pictures = stand_ins.StandInPictures(letters)
    return kind(None, None, network.eval(), letters, pictures, None)


def test_texts_are_those_of_the_pipeline(folder) -> None:
    """All rows of the padded caption, quoted characters one by one, instruction cut off."""
    ours, pipe = encoding.encoder("longcat", folder), _pipeline(LongCatImagePipeline, folder)
    assert (ours.width, ours.max_length) == (16, 512)
    for caption in CAPTIONS:
        with torch.no_grad():
            rows, ids = pipe.encode_prompt(caption)
        assert torch.equal(ours.encode(caption), rows[0].bfloat16()) and len(ids) == 512
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
        assert ours.count(caption) == len(caption) - caption.startswith(SIGN) * (len(SIGN) - 1)
    encoding.check_card(ours)


def test_words_with_apostrophes_are_not_exchanged(folder, monkeypatch) -> None:
    """Diffusers' own function puts one of two such words in the place of the other."""
    caption, pipe = "a cat that doesn't see what's there", _pipeline(LongCatImagePipeline, folder)
    found = encoding.encoder("longcat", folder).encode(caption)
    monkeypatch.setattr(pipeline_longcat_image, "split_quotation", lambda text: [(text, False)])
    with torch.no_grad():
        rows, _ = pipe.encode_prompt(caption)
    assert torch.equal(found, rows[0].bfloat16())


def test_texts_of_edits_are_those_of_the_pipeline(folder, monkeypatch) -> None:
    """Rows of the picture before those of the caption; the null text has as many."""
    pipe, seen = _pipeline(LongCatImageEditPipeline, folder), dict[str, Any]()
    monkeypatch.setattr(LongCatEditText, "load_processor", lambda _: pipe.image_processor_vl)
    ours, kept = encoding.encoder("longcat_edit", folder), pipe.encode_prompt
    pixels = np.random.default_rng(2).integers(0, 256, (50, 90, 3), dtype=np.uint8)
    shown = Image.fromarray(pixels)

    class SeenError(Exception): ...

    def encoded(**given: Any) -> Any:
        seen[given["prompt"]] = kept(**given)[0][0].bfloat16()
        return seen[given["prompt"]][None], None

    def prepared(*_: Any) -> None:
        raise SeenError

    pipe.encode_prompt, pipe.prepare_latents = encoded, prepared
    with torch.no_grad(), pytest.raises(SeenError):
        pipe(image=shown, prompt=CAPTIONS[0])
    found = ours.encode_beside(CAPTIONS[0], [shown])
    assert torch.equal(found["text"], seen[CAPTIONS[0]])
    assert torch.equal(found["null_text"], seen[""])
    assert found["text"].shape == found["null_text"].shape and len(found["text"]) > 514
    cut = ours.encode_beside(CAPTIONS[2], [shown])["text"]
    assert torch.equal(cut, ours.encode_beside("x" * 512, [shown])["text"])
    with pytest.raises(CodecError, match="with the picture to edit"):
        ours.encode_all("a fox")
    assert vae.codec_named("longcat_edit").edits_pictures
