"""What is asked for: files of prompts, sizes in pixels, and where the encoders are."""

from __future__ import annotations

import json

import pytest
import torch

from data_prep import processors, text
from data_prep.refusals import PrepError
from data_prep.weights import Place
from dit.config import ModelConfig
from recipes.prompts import Prompt, read_prompts, unused
from recipes.sizes import Steps, rounding
from tests import tiny_pipelines


def test_prompts_from_lines_and_from_json(tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n a cat \n\na dog\n")
    assert read_prompts(lines) == [Prompt(text="a cat"), Prompt(text="a dog")]
    file = tmp_path / "validation.json"
    entry = {"caption": "a cat", "height": 480, "width": 832, "num_frames": 77}
    entry |= {"num_inference_steps": 50, "video_path": None, "negative_prompt": "blurred"}
    file.write_text(json.dumps({"data": [entry, {"caption": "a dog"}]}))
    sizes = {"height": 480, "width": 832, "num_video_frames": 77}
    cat = Prompt(text="a cat", **sizes, negative="blurred", unused=("num_inference_steps",))
    assert read_prompts(file) == [cat, Prompt(text="a dog")]
    assert unused(read_prompts(file)) == "not used, of the file of prompts: num_inference_steps"
    file.write_text('["a cat"]')
    assert read_prompts(file) == [Prompt(text="a cat")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "is no JSON"),
        ('{"prompts": []}', "has no list"),
        ('[{"text": "a"}]', 'entry 0 has no "caption"'),
        ('[{"caption": "a", "height": 0}]', 'entry 0: "height": 0 must be'),
        ('[{"caption": "a", "negative_prompt": 3}]', 'entry 0: "negative_prompt": 3 must be'),
        ("[]", "has no prompt"),
    ],
)
def test_json_that_holds_no_prompts_is_named(tmp_path, content, said):
    file = tmp_path / "validation.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"validation.prompts_file .*validation.json") as raised:
        read_prompts(file, option="validation.prompts_file")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("pixels", "latent", "made"),
    [
        ((1, 240, 416), (1, 30, 52), (1, 240, 416)),
        ((10, 240, 416), (4, 30, 52), (13, 240, 416)),
        ((13, 233, 401), (4, 30, 52), (13, 240, 416)),
        ((2, 1, 17), (2, 2, 4), (5, 16, 32)),
    ],
)
def test_sizes_are_rounded_up_to_what_decoder_and_patches_take(pixels, latent, made):
    steps = Steps(stride=8, temporal_stride=4, patch_spatial=2, patch_temporal=1)
    assert steps.latent(pixels) == latent and steps.pixels(latent) == made
    said = rounding(pixels, made)
    assert (not said) == (pixels == made)
    if pixels == (10, 240, 416):
        assert said.startswith("generates 13 frames") and said.endswith("of which 10 are kept")


def test_encoders_are_found_where_the_user_says(tmp_path):
    """The dataset was packed with a hub's model, which lies in a folder now."""
    folder = tiny_pipelines.wan(tmp_path / "wan")
    made = processors.from_card(_card(str(folder)))
    card = _card("Wan-AI/not-here")
    found = processors.from_card(card, Place(cache=str(folder), local_only=True))
    latent = torch.randn(found.channels, 2, 4, 4)
    with found.visiting(torch.device("cpu")):
        assert torch.equal(found.decode(latent), made.decode(latent))
    assert Steps.of(found, ModelConfig()).pixels((2, 4, 4))[0] == 5
    caption = text.from_card(card, Place(cache=str(folder), local_only=True)).encode("a cat")
    assert torch.equal(caption, text.from_card(_card(str(folder))).encode("a cat"))
    with pytest.raises(PrepError, match="Wan-AI/not-here"):
        processors.from_card(card, Place(local_only=True))


def _card(model: str) -> dict:
    part = {"model_name": model, "precision": "float32"}
    codec = {**part, "name": "wan", "stochastic": False, "image_conditioning": False}
    encoder = {**part, "name": "wan", "max_length": 32, "revision": "1"}
    latent = {"mean": [0.0] * 16, "std": [1.0] * 16}
    return {"format_version": 1, "processor": codec, "latent": latent, "text_encoder": encoder}
