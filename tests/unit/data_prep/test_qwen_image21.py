"""Qwen-Image-2.1: texts and latents are its pipeline's; transparency is encoded, and comes back."""

# L tokens, E width; F H W frames, rows, columns

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import (
    QwenImage21Pipeline,
    calculate_dimensions,
)
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from data_prep.cli.parser import main
from dit.codecs.text.qwen_image import QwenImage21Text
from dit.codecs.vae.families import QwenImage21
from tests.families import encoding, qwen_image21, stand_ins

CAPTION = "a red bird on a roof"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_image21.encoders(tmp_path_factory.mktemp("qwen21"))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def processor(encoder: QwenImage21Text) -> Any:
        return stand_ins.StandInChatProcessor(encoder.load_tokenizer("processor"))

    monkeypatch.setattr(QwenImage21Text, "load_processor", processor)


def pipeline(folder: Path) -> Any:
    network = Qwen3VLForConditionalGeneration.from_pretrained(folder, subfolder="text_encoder")
    vae = AutoencoderKLQwenImage21.from_pretrained(folder, subfolder="vae")
    letters = AutoTokenizer.from_pretrained(folder, subfolder="processor")
    parts: Any = {"scheduler": None, "transformer": None, "vae": vae.eval()}
    processor: Any = stand_ins.StandInChatProcessor(letters)
    return QwenImage21Pipeline(text_encoder=network.eval(), processor=processor, **parts)


def clear(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with transparency."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_texts_are_those_of_the_pipeline(folder) -> None:
    """States before the last norm, without the system's turn; an empty caption is a blank one."""
    pipe, ours = pipeline(folder), encoding.encoder("qwen_image21", folder)
    for caption in (CAPTION, ""):
        with torch.no_grad():
            rows_1LE, _, _ = pipe.encode_prompt(caption)
        assert torch.equal(ours.encode(caption), rows_1LE[0].bfloat16())
        assert not ours.is_cut(caption) and ours.count(caption) == rows_1LE.shape[1]
    long = encoding.encoder("qwen_image21", folder, max_sequence_length=80)
    assert long.is_cut("x" * 90) and not long.is_cut("x")
    assert len(long.encode("x" * 300)) < len(ours.encode("x" * 300))
    encoding.check_card(ours)


def test_texts_of_edits_are_those_of_the_pipeline_without_slots(folder) -> None:
    """A text before each of three pictures, and behind all; those before see no caption."""
    pipe, ours = pipeline(folder), encoding.encoder("qwen_image21", folder)
    pictures = [clear(60 + 40 * n, 50, seed=n).convert("RGB") for n in range(3)]
    shown = []
    for one in pictures:
        width, height, _ = calculate_dimensions(1024 * 1024, one.width / one.height)
        assert QwenImage21.reference_size(one.width, one.height) == (width, height)
        shown.append(pipe.image_processor.resize(one, width=width, height=height))
    found = ours.encode_beside(CAPTION, pictures)
    assert [*found] == [*(f"text_before_{n}" for n in range(3)), "text", "null_text"]
    for caption, last in ((CAPTION, "text"), ("", "null_text")):
        with torch.no_grad():
            rows_1LE, _, is_slot_1L = pipe.encode_prompt(caption, shown)
        expected = rows_1LE[0][~is_slot_1L[0]].bfloat16()
        mine = torch.cat([found[name] for name in (*[*found][:3], last)])
        assert mine.shape == expected.shape and torch.equal(mine, expected)
    assert all(len(found[name]) > 3 for name in found)
    other = ours.encode_beside("a blue one", pictures)
    assert all(torch.equal(other[name], found[name]) for name in [*found][:3])
    encoding.check_card(ours)


def test_latents_are_those_of_the_pipeline_with_transparency(folder) -> None:
    """RGB is RGBA with alpha 1; what is decoded keeps its transparency, or is put on white."""
    codec, pipe = encoding.codec("qwen_image21", folder), pipeline(folder)
    assert (codec.pixel_channels, codec.stride, codec.side_cells) == (4, 16, 2)
    assert "alpha 1" in codec.notices[0] and "--background" in codec.notices[0]
    picture = pipe.image_processor.preprocess(clear(64, 32))[:, :, None]
    with torch.no_grad():
        expected = pipe._encode_vae_image(picture, generator=None)[0]
    found = codec.whitening.apply(codec.encode_raw(picture[0]))
    assert found.shape == (16, 1, 2, 4) and (found - expected).abs().max() < 1e-5
    opaque = picture[0].clone()
    opaque[3] = 1
    assert torch.equal(codec.encode(opaque[:3]), codec.encode(opaque))
    assert not torch.equal(codec.encode(opaque), codec.encode(picture[0]))
    levels = codec.decode(found, alpha=True).numpy().astype(float)
    assert levels.shape == (1, 32, 64, 4)
    on_white = 255 + levels[..., 3:] / 255 * (levels[..., :3] - 255)
    assert np.abs(codec.decode(found).numpy() - on_white).max() < 0.51


def test_a_dataset_of_transparent_pictures_with_transparent_controls(
    folder, tmp_path: Path, read_samples, capsys
) -> None:
    """The encoder sees controls on white; sides are multiples of 32 pixels; 11 are too many."""
    for part, size in (("after", (64, 40)), ("before", (70, 64))):
        (tmp_path / part).mkdir()
        clear(*size, seed=len(part)).save(tmp_path / part / "a.png")
    clear(64, 64).convert("RGB").save(tmp_path / "after" / "b.png")
    options = ["--image_dir", tmp_path / "after", "--processor", "qwen_image21"]
    options += ["--model_name", folder, "--num_workers", 0, "--split", "1,0,0"]
    options += ["--missing_caption", "filename", "--max_bad_fraction", "0.5"]
    control = ["--control_dir", tmp_path / "before", "--reference_size", "own"]
    words = ["image", *options, *control, "--output_dir", tmp_path / "out"]
    assert main([*map(str, words)]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("without transparency with alpha 1") == 1
    (sample,) = read_samples(tmp_path / "out").values()
    codec = encoding.codec("qwen_image21", folder)
    pixels = torch.from_numpy(np.asarray(Image.open(tmp_path / "after/a.png")).copy())
    cut_CFHW = (pixels[4:36].permute(2, 0, 1)[:, None].float() / 127.5) - 1
    assert sample["latent"].shape == (16, 1, 2, 4)
    assert torch.equal(sample["latent"], codec.encode(cut_CFHW))
    assert sample["reference_latent_0"].shape == (16, 1, 4, 4)
    before = Image.open(tmp_path / "before/a.png")
    wanted = encoding.encoder("qwen_image21", folder).encode_beside("a", [before])
    assert all(torch.equal(sample[name], rows) for name, rows in wanted.items())
    many = [word for _ in range(11) for word in ("--control_dir", str(tmp_path / "before"))]
    words = ["image", *options, *many, "--output_dir", tmp_path / "many"]
    assert main([*map(str, words)]) == 1
    refused = [json.loads(x) for x in (tmp_path / "many/refused.jsonl").read_text().splitlines()]
    assert any("with at most 10 pictures, and this file has 11" in one["detail"] for one in refused)
    assert (
        main(
            [
                *map(str, words[:-4]),
                "--output_dir",
                str(tmp_path / "odd"),
                "--height",
                "48",
                "--width",
                "64",
            ]
        )
        == 1
    )
    assert "--height 48 must be a multiple of 32 pixels" in capsys.readouterr().err
