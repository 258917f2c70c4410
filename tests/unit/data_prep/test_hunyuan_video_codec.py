"""Latents and texts of the first HunyuanVideo are those of its pipeline, on tiny random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import (
    DEFAULT_PROMPT_TEMPLATE,
)
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, CLIPTextModel, LlamaModel

from data_prep.cli.parser import main
from data_prep.media.videos import frames, timeline
from dit.codecs.dataset_card import NULL_TEXT_NAME, CodecError
from dit.codecs.text import text_encoder_named
from tests.families import pipeline_parts
from tests.media_files import image, video
from tests.unit.data_prep.test_pretrained_codecs import clip, codec, encoder, parts_of, raw

CAPTION = 'A  sign says "open" &amp; shut'
LENGTH = 900  # the instruction is 500 letters longer than the 95 tokens that are cut off


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_parts.hunyuan_video(tmp_path_factory.mktemp("hunyuan_video"))


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


def shown_frame(height: int = 40, width: int = 60, seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def say_network(folder: Path, shown: str | None) -> Path:
    """A pipeline folder's transformer/config.json."""
    (folder / "transformer").mkdir(exist_ok=True)
    content = json.dumps({"image_condition_type": shown})
    (folder / "transformer/config.json").write_text(content)
    return folder


@pytest.fixture(scope="module")
def with_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = pipeline_parts.hunyuan_video_i2v(tmp_path_factory.mktemp("hunyuan_video_i2v"))
    return say_network(folder, "token_replace")


@pytest.fixture(scope="module")
def image_to_video(with_llava: Path) -> HunyuanVideoImageToVideoPipeline:
    """Diffusers' pipeline, its text encoders opened by Transformers."""
    kinds = {"text_encoder": "LlavaForConditionalGeneration", "text_encoder_2": "CLIPTextModel"}
    kinds |= {"tokenizer": "AutoTokenizer", "tokenizer_2": "AutoTokenizer"}
    parts = parts_of(with_llava, **kinds, image_processor="CLIPImageProcessor")
    blank: Any = dict.fromkeys(("scheduler", "vae", "transformer"))
    return HunyuanVideoImageToVideoPipeline(**blank, **parts)


@pytest.mark.parametrize(("shown", "rows"), [("token_replace", 144), ("latent_concat", 288)])
def test_rows_of_a_first_frame_are_those_of_the_pipeline(
    with_llava: Path, tmp_path: Path, image_to_video: Any, shown: str, rows: int
) -> None:
    for part in with_llava.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "transformer").unlink()
    ours, pipe = encoder("hunyuanvideo_i2v", say_network(tmp_path, shown)), image_to_video
    ours = replace(ours, max_length=256)
    assert (ours.width, ours.sees_first_frame) == (16, True)

    def expected(picture: Image.Image, caption: str, interleave: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            made, mask = pipe._get_llama_prompt_embeds(
                picture, caption, DEFAULT_PROMPT_TEMPLATE, image_embed_interleave=interleave
            )
            pooled = pipe._get_clip_prompt_embeds(caption)
        kept = {"text": made[0, mask[0].bool()], "pooled_text": pooled[0]}
        return {name: tensor.to(torch.bfloat16) for name, tensor in kept.items()}

    def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
        assert found.keys() == wanted.keys()
        return all(torch.equal(found[name], wanted[name]) for name in wanted)

    first, other = shown_frame(), shown_frame(seed=1)
    found = ours.encode_beside(CAPTION, [first])
    assert same(found, expected(first, CAPTION, 576 // rows))
    assert not same(found, expected(other, CAPTION, 576 // rows))
    # A negative prompt stands behind a black picture of any size, of which 288 rows are kept.
    null = ours.encode_all("")
    assert same(null, expected(Image.new("RGB", (96, 32)), "", 2))
    assert same(ours.encode_all("blurry"), expected(Image.new("RGB", (8, 8)), "blurry", 2))
    assert len(found["text"]) - rows - (len(null["text"]) - 288) == len(CAPTION)  # by letters
    # The tokens behind a caption count, four of which the pipeline takes out again.
    assert [ours.is_cut("x" * length) for length in (251, 252)] == [False, True]
    assert len(ours.encode_beside("x" * 300, [first])["text"]) == rows + 252


def test_encoders_refuse_the_folders_of_each_other(folder: Path, with_llava: Path) -> None:
    llava = encoder("hunyuanvideo", with_llava)
    said = "is of type 'llava', not 'llama'; .* --processor hunyuanvideo_i2v"
    for asked in (lambda: llava.width, lambda: llava.embed(CAPTION)):
        with pytest.raises(CodecError, match=said):
            asked()
    with pytest.raises(CodecError, match=r"'llama', not 'llava'.* --processor hunyuanvideo"):
        encoder("hunyuanvideo_i2v", folder)
    with pytest.raises(CodecError, match=r"--workload_type t2v: .*; give i2v"):
        codec("hunyuanvideo_i2v", with_llava, workload_type="t2v")


def test_the_folder_tells_how_many_rows_its_network_reads(tmp_path: Path, with_llava: Path) -> None:
    (tmp_path / "text_encoder").symlink_to(with_llava / "text_encoder")
    for say in (lambda: None, lambda: say_network(tmp_path, None)):
        say()
        with pytest.raises(CodecError, match=r"image_condition_type .*_interleave: 4 for"):
            encoder("hunyuanvideo_i2v", tmp_path)
    asked: Any = encoder("hunyuanvideo_i2v", tmp_path, image_embed_interleave=3)
    assert asked.image_embed_interleave == 3
    again = text_encoder_named("hunyuanvideo_i2v").from_settings(asked.settings)
    assert again.settings == asked.settings and again == asked


def test_packing_with_first_frames(with_llava: Path, tmp_path: Path, read_samples, capsys) -> None:
    """Each sample has the rows of its own first frame; a dropped caption those of a black one."""
    clip = video(tmp_path / "in/b.mp4", 9, size=(96, 64))
    (tmp_path / "in/b.txt").write_text(CAPTION)
    options = ["--processor", "hunyuanvideo_i2v", "--model_name", with_llava, "--num_workers", 0]
    options += ["--video_dir", tmp_path / "in", "--split", "1,0,0", "--output_dir"]
    assert main(["video", *map(str, options), str(tmp_path / "out")]) == 0
    assert "captions alone" not in capsys.readouterr().out
    ((_, sample),) = read_samples(tmp_path / "out").items()
    assert sample["first_frame_latent"].shape[1] == 1
    ours = replace(encoder("hunyuanvideo_i2v", with_llava), max_length=256)
    expected = ours.encode_beside(CAPTION, [*frames(clip, timeline(clip).shown[:1])])
    assert all(torch.equal(sample[name], expected[name]) for name in ("text", "pooled_text"))
    stored = load_file(tmp_path / "out" / NULL_TEXT_NAME)
    null = ours.encode_all("")
    assert stored.keys() == null.keys() and all(torch.equal(stored[n], null[n]) for n in null)
    card = json.loads((tmp_path / "out/dataset_card.json").read_text())
    assert card["text_encoder"]["image_embed_interleave"] == 4
    assert main(["inspect", str(tmp_path / "out")]) == 0
    options[1] = "hunyuanvideo"
    assert main(["video", *map(str, options), str(tmp_path / "text")]) == 1
    assert "its text_encoder is of type 'llava'" in capsys.readouterr().err


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
