"""Texts of HiDream-I1 are its pipeline's; levels of its samplers, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.hidream_image.pipeline_hidream_image import HiDreamImagePipeline
from transformers import (
    AutoTokenizer,
    CLIPTextModelWithProjection,
    LlamaForCausalLM,
    T5EncoderModel,
)

from dit.codecs import text
from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import PipelineComponent, load
from dit.config import Precision
from dit.convert.diffusers_config import model_config
from dit.convert.errors import ConvertError
from dit.models.hidream.diffusers import CLASS
from tests.families import encoding, pipeline_parts

CAPTIONS = ["a red bird on a roof", "", "x" * 300]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """The empty caption as others; padding of all encoders is kept."""
    folder = pipeline_parts.hidream(tmp_path)
    ours = encoding.encoder("hidream", folder)
    assert (ours.width, ours.max_length, ours.rows_of("a")) == (16, 128, 256)
    (notice,) = ours.notices
    assert "each caption takes 0.0 MB: 128 rows of 3 hidden states of Llama" in notice
    clip, kinds = CLIPTextModelWithProjection, {"text_encoder_3": T5EncoderModel}
    kinds |= {"text_encoder": clip, "text_encoder_2": clip, "text_encoder_4": LlamaForCausalLM}
    parts: Any = dict.fromkeys(("scheduler", "vae", "transformer"))
    parts |= {k: one.from_pretrained(folder, subfolder=k).eval() for k, one in kinds.items()}
    for end in ("", "_2", "_3", "_4"):
        name = f"tokenizer{end}"
        parts[name] = AutoTokenizer.from_pretrained(folder, subfolder=name)
    pipe = HiDreamImagePipeline(**parts)
    for caption in CAPTIONS:
        with torch.no_grad():
            t5, _, llama, _, pooled, _ = pipe.encode_prompt(
                caption, do_classifier_free_guidance=False
            )
        own = ours.encode_all(caption)
        assert torch.equal(own["text"], t5[0].bfloat16()) and len(own["text"]) == 128
        assert torch.equal(own["pooled_text"], pooled[0].bfloat16())
        for number, states in enumerate(llama):
            columns = slice(20 * number, 20 * (number + 1))
            assert torch.equal(own["text_2"][:, columns], states[0].bfloat16())
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    encoding.check_card(ours)


def test_llama_lies_beside_the_published_folder(tmp_path: Path) -> None:
    encoder: Any = text.text_encoder_named("hidream").from_settings(
        {"model_name": str(tmp_path), "max_length": 128, "precision": "float32"}
    )

    def place(one: Any) -> PipelineComponent:
        return one._llama_part("LlamaForCausalLM", "text_encoder_4")

    assert (place(encoder).model, place(encoder).subfolder) == (
        "meta-llama/Llama-3.1-8B-Instruct",
        "",
    )
    named = replace(encoder, llama_model="models/llama")
    assert place(named).model == "models/llama"
    assert named.settings["llama_model"] == "models/llama" and "llama_model" not in encoder.settings
    (tmp_path / "llama").mkdir()
    empty = replace(encoder, llama_model=str(tmp_path / "llama"))
    with pytest.raises(
        CodecError, match=r"^--llama_model .*llama cannot be loaded as Llama.*of Transformers$"
    ):
        load(replace(place(empty), precision="float32"))


def test_the_network_of_edits_is_refused_by_its_pipeline() -> None:
    told: Any = {"precision": Precision.BF16, "place": "config.json"}
    kind = "HiDreamImageEditingPipeline"  # its tensors have the names and shapes of I1's
    with pytest.raises(
        ConvertError, match=rf"config\.json cannot be imported: a {kind} .* with the target"
    ):
        model_config({"_class_name": CLASS}, pipeline=kind, **told)
