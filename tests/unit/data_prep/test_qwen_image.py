"""Qwen-Image and its edit models: texts and latents against Diffusers' pipelines."""

# L tokens, E width

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.parser import main
from dit.codecs import text
from dit.codecs.dataset_card import NULL_TEXT_NAME, CodecError
from dit.codecs.text.qwen_image import QwenImageEditText, QwenImageText
from dit.codecs.vae.families import QwenImageEdit
from tests.families import encoding, pipeline_parts, stand_ins
from tests.media_files import image

CAPTION = "a red bird on a roof"
CPU = torch.device("cpu")
EDITS = {"qwen_image_edit": "QwenImageEditPipeline"}
EDITS |= {"qwen_image_edit_2511": "QwenImageEditPlusPipeline"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_parts.qwen_image(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def processor(encoder: QwenImageEditText) -> Any:
        return stand_ins.StandInProcessor(encoder.load_tokenizer("tokenizer"))

    monkeypatch.setattr(QwenImageEditText, "load_processor", processor)


def pipeline(folder: Path, kind: str, **more: Any) -> Any:
    """The pipeline with its own text encoder, opened by Transformers."""
    import diffusers
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    network = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, subfolder="text_encoder")
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    if kind != "QwenImagePipeline":
        more["processor"] = stand_ins.StandInProcessor(letters)
    blank = dict.fromkeys(("scheduler", "transformer"))
    parts = {"text_encoder": network.eval(), "tokenizer": letters, "vae": None, **more}
    return getattr(diffusers, kind)(**blank, **parts)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("caption", [CAPTION, "", "x" * 1400], ids=["caption", "null", "long"])
@pytest.mark.parametrize("length", [None, 1024, 40])
def test_texts_are_those_of_the_pipeline(folder, caption, length) -> None:
    """34 tokens cut, the rest of the instruction kept, up to 512 rows (the pipeline's default)."""
    pipe = pipeline(folder, "QwenImagePipeline")
    with torch.no_grad():
        expected, mask = pipe._get_qwen_prompt_embeds(caption, CPU)
        given = {} if length is None else {"max_sequence_length": length}
        cut, _ = pipe.encode_prompt(caption, CPU, **({"max_sequence_length": 512} | given))
    assert bool(mask.all())
    ours = encoding.encoder("qwen_image", folder, max_sequence_length=length)
    found = ours.embed(caption)["text"]
    assert (found - cut[0]).abs().max() < 1e-6
    assert (found - expected[0, : len(found)]).abs().max() < 1e-6
    # One token a character here: what the template says before and after the caption, and the end.
    rows = len(pipe.prompt_template_encode.format(caption)) + 1 - 34
    assert len(found) == min(rows, 1024 + 34 - 34, length or 512)
    assert ours.is_cut(caption) == (rows > (length or 512))


def test_pipelines_take_no_longer_texts(folder) -> None:
    with pytest.raises(CodecError, match=r"--max_sequence_length 1025.* at most 1024"):
        encoding.encoder("qwen_image", folder, max_sequence_length=1025)
    assert encoding.encoder("qwen_image", folder).max_length == 512


@pytest.mark.parametrize("name", EDITS)
def test_texts_of_edits_are_those_of_the_pipelines(folder, name) -> None:
    """The whole way of a picture: its size, the instruction, the tokens of the picture, 64 cut."""
    pipe, ours = pipeline(folder, EDITS[name]), encoding.encoder(name, folder)
    count = 1 if name == "qwen_image_edit" else 3
    pictures = [picture(60 + 40 * n, 50, seed=n) for n in range(count)]
    seen: dict[str, torch.Tensor] = {}

    class SeenError(Exception): ...

    def prepared(*_: Any, **__: Any) -> None:
        raise SeenError

    kept = pipe.encode_prompt

    def encoded(**given: Any) -> Any:
        rows, mask = kept(**given)
        seen[given["prompt"]] = rows[0]
        return rows, mask

    pipe.encode_prompt, pipe.prepare_latents = encoded, prepared
    pipe.transformer = Namespace(config=Namespace(in_channels=64, guidance_embeds=False))
    with torch.no_grad(), pytest.raises(SeenError):
        shown = pictures if count > 1 else pictures[0]
        pipe(image=shown, prompt=CAPTION, negative_prompt="", true_cfg_scale=4.0)
    found = ours.encode_beside(CAPTION, pictures)
    assert found.keys() == {"text", "null_text"}
    for tensor, caption in (("text", CAPTION), ("null_text", "")):
        expected = seen[caption].to(torch.bfloat16)
        assert found[tensor].shape == expected.shape
        assert torch.equal(found[tensor], expected)
    assert len(found["text"]) - len(found["null_text"]) == len(CAPTION)
    other = [picture(60 + 40 * n, 50, seed=9 + n) for n in range(count)]
    for tensor, rows in ours.encode_beside(CAPTION, other).items():
        assert not torch.equal(rows, found[tensor])  # the empty caption sees the picture, too
    with pytest.raises(CodecError, match="with the picture to edit"):
        ours.encode_all(CAPTION)


def test_latents_are_those_of_the_pipeline(folder) -> None:
    from diffusers import AutoencoderKLQwenImage

    network = AutoencoderKLQwenImage.from_pretrained(folder, subfolder="vae")
    pipe = pipeline(folder, "QwenImageEditPipeline", vae=network)
    shown = torch.rand(3, 1, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        expected = pipe._encode_vae_image(shown[None], generator=None)[0]
    codec = encoding.codec("qwen_image", folder)
    found = codec.whitening.apply(codec.encode_raw(shown))
    assert found.shape == (16, 1, 4, 6)
    assert (codec.stride, codec.temporal_stride) == (8, 4)
    clip = torch.rand(3, 5, 32, 48, generator=torch.Generator().manual_seed(2)) * 2 - 1
    assert codec.encode(clip).shape == (16, 2, 4, 6)
    assert (found - expected).abs().max() < 1e-5
    assert codec.decode(found).shape == (1, 32, 48, 3)


def test_published_sizes_are_those_of_the_pipelines() -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
        VAE_IMAGE_SIZE,
        calculate_dimensions,
    )

    for width, height in ((64, 64), (300, 100), (123, 457)):
        expected = calculate_dimensions(VAE_IMAGE_SIZE, width / height)[:2]
        assert QwenImageEdit.reference_size(width, height) == expected
        assert not any(side % 16 for side in expected)


def arguments(tmp_path: Path, folder: Path, name: str) -> list[str]:
    options = ["--image_dir", tmp_path / "after", "--output_dir", tmp_path / "out"]
    options += ["--processor", name, "--model_name", folder, "--num_workers", 0]
    return [*map(str, options), "--split", "1,0,0", "--missing_caption", "filename"]


def test_a_dataset_of_edits(folder, tmp_path: Path, read_samples) -> None:
    """Each sample has its own null text beside its text; what lacks a picture is refused."""
    for name in ("a.png", "b.png"):
        image(tmp_path / "after" / name, 32, 32, seed=1)
    image(tmp_path / "before/a.png", 48, 32, seed=2)
    image(tmp_path / "pose/a.png", 32, 32, seed=3)
    controls = ["--control_dir", str(tmp_path / "before"), "--control_dir", str(tmp_path / "pose")]
    options = arguments(tmp_path, folder, "qwen_image_edit_2511")
    assert main(["image", *options, *controls, "--max_bad_fraction", "0.5"]) == 0
    (sample,) = read_samples(tmp_path / "out").values()
    originals = [Image.open(tmp_path / part / "a.png") for part in ("before", "pose")]
    expected = encoding.encoder("qwen_image_edit_2511", folder).encode_beside("a", originals)
    for tensor in ("text", "null_text"):
        assert torch.equal(sample[tensor], expected[tensor])
    assert {"reference_latent_0", "reference_latent_1"} <= sample.keys()
    assert not (tmp_path / "out" / NULL_TEXT_NAME).exists()
    (line,) = (tmp_path / "out/refused.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "control picture or video is missing"


@pytest.mark.parametrize("controls", [0, 2])
def test_the_first_edit_model_sees_one_picture(folder, tmp_path: Path, controls, capsys) -> None:
    image(tmp_path / "after/a.png", 32, 32)
    more: list[str] = []
    for number in range(controls):
        image(tmp_path / f"before{number}/a.png", 32, 32, seed=number)
        more += ["--control_dir", str(tmp_path / f"before{number}")]
    options = arguments(tmp_path, folder, "qwen_image_edit")
    assert main(["image", *options, *more]) == 1
    (line,) = (tmp_path / "out/refused.jsonl").read_text().splitlines()
    few = "a control picture, and this file has none"
    many = "with at most 1 pictures, and this file has 2"
    said = many if controls else few
    assert said in json.loads(line)["detail"]
    assert "Traceback" not in capsys.readouterr().err


def test_without_torchvision_the_processor_is_an_error_that_names_it(folder, monkeypatch) -> None:
    import transformers

    monkeypatch.undo()  # of the stand-in

    class Missing:
        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> Any:
            raise ImportError("Qwen2VLImageProcessor requires the Torchvision library")

    monkeypatch.setattr(transformers, "Qwen2VLProcessor", Missing, raising=False)
    with pytest.raises(CodecError, match=r"processor/ cannot be loaded.*Torchvision"):
        encoding.encoder("qwen_image_edit", folder).load_processor()


def test_the_card_rebuilds_the_encoder(folder) -> None:
    ours = encoding.encoder("qwen_image", folder)
    card = json.loads(json.dumps({"format_version": 1, "text_encoder": ours.settings}))
    rebuilt = text.text_encoder_of_card(card)
    assert isinstance(rebuilt, QwenImageText) and rebuilt.width == 16
    assert torch.equal(rebuilt.encode(CAPTION), ours.encode(CAPTION))
