"""Latents and texts of the first HunyuanVideo are those of its pipeline, on tiny random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideoPipeline
from transformers import AutoTokenizer, CLIPTextModel, LlamaModel

from data_prep.cli.parser import main
from dit.codecs.dataset_card import CodecError
from tests import tiny_pipelines
from tests.media_files import image, video
from tests.unit.data_prep.test_pretrained_codecs import clip, codec, encoder, parts_of, raw

CAPTION = 'A  sign says "open" &amp; shut'
LENGTH = 900  # the instruction is 500 letters longer than the 95 tokens that are cut off


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.hunyuan_video(tmp_path_factory.mktemp("hunyuan_video"))


def test_latents_are_those_of_the_pipeline(folder: Path) -> None:
    vae = parts_of(folder, vae="AutoencoderKLHunyuanVideo")["vae"]
    model, shown = codec("hunyuanvideo", folder, workload_type="i2v"), clip(9)
    with torch.no_grad():
        expected = vae.encode(shown[None]).latent_dist.mode()[0] * vae.config.scaling_factor
        first = vae.encode(shown[None, :, :1]).latent_dist.mode()[0] * vae.config.scaling_factor
    assert (raw("hunyuanvideo", model, shown) - expected).abs().max() < 1e-5
    (parts,) = model.encode_batch([shown], keys=["a"])
    assert parts["latent"].shape == (4, 3, 4, 8) and "image_embed" not in parts
    assert (parts["first_frame_latent"].float() - first).abs().max() < 2e-3
    (notice,) = model.notices
    assert "captions alone" in notice


@pytest.mark.parametrize("caption", [CAPTION, ""])
def test_texts_are_those_of_the_pipeline(folder: Path, caption: str) -> None:
    pipe = HunyuanVideoPipeline(
        **dict.fromkeys(("scheduler", "vae", "transformer")),
        text_encoder=LlamaModel.from_pretrained(folder / "text_encoder"),
        text_encoder_2=CLIPTextModel.from_pretrained(folder / "text_encoder_2"),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        tokenizer_2=AutoTokenizer.from_pretrained(folder / "tokenizer_2"),
    )
    with torch.no_grad():
        text, pooled, mask = pipe.encode_prompt(caption, max_sequence_length=LENGTH)
    found = encoder("hunyuanvideo", folder, max_sequence_length=LENGTH).embed(caption)
    rows = int(mask.sum())
    assert rows < LENGTH
    assert (found["text"] - text[0, :rows]).abs().max() < 1e-5
    assert (found["pooled_text"] - pooled[0]).abs().max() < 1e-5


def test_an_encoder_that_sees_the_picture_is_refused(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "text_encoder"
    place.mkdir()
    content = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (place / "config.json").write_text(json.dumps(content))
    llava = encoder("hunyuanvideo", tmp_path)
    for asked in (lambda: llava.width, lambda: llava.embed(CAPTION)):
        with pytest.raises(CodecError, match="is of type 'llava', which sees the first frame"):
            asked()


def test_packing(folder: Path, tmp_path: Path, read_samples) -> None:
    image(tmp_path / "in/a.png", 80, 48)
    video(tmp_path / "in/b.mp4", 9, size=(96, 64))
    options = ["--processor", "hunyuanvideo", "--model_name", folder, "--workload_type", "i2v"]
    options += ["--image_dir", tmp_path / "in", "--video_dir", tmp_path / "in"]
    options += ["--max_sequence_length", LENGTH, "--num_workers", 0, "--split", "1,0,0"]
    options += ["--output_dir", tmp_path / "out"]
    assert main(["video", *map(str, options)]) == 0
    samples = read_samples(tmp_path / "out")
    assert sorted(sample["latent"].shape[1] for sample in samples.values()) == [1, 3]
    for sample in samples.values():
        assert sample["pooled_text"].shape == (16,) and sample["text"].shape[1] == 16
        assert sample["first_frame_latent"].shape[1] == 1
