"""What is asked for: files of prompts, sizes in pixels, and where the encoders are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit.codecs import text, vae
from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import ModelLocation
from dit.models.dit.family import DitConfig
from dit.models.registry import named_model
from dit.sampling.commands.generate_media import options_of_prompt
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.latent_sizes import MOST_PIXELS, LatentStride, rounding
from dit.sampling.prompts import Prompt, read_prompts, unused
from recipes import evaluate_digits, generate_dit
from tests.families import pipeline_parts
from tests.hostile import damaged, json_bytes, mistaken


def test_many_keys_of_one_entry_take_no_longer_each(tmp_path):
    """Each key was once compared with all others: 30,000 took half a minute, 10^6 hours."""
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"caption": "a"} | {f"k{n}": 1 for n in range(200_000)}]))
    (prompt,) = read_prompts(file)
    assert prompt.text == "a" and len(prompt.unused) == 200_000


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
    said = "keys in the file of prompts that are not used: num_inference_steps"
    assert unused(read_prompts(file)) == said
    file.write_text(
        '{"fps": 3, "data": [{"prompt": "a", "video": "x"}, {"caption": "b", "prompt": "c"}]}'
    )
    assert [prompt.text for prompt in read_prompts(file)] == ["a", "b"]
    assert unused(read_prompts(file)).endswith(": fps, prompt, video")
    file.write_text('["a cat"]')
    assert read_prompts(file) == [Prompt(text="a cat")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "is not valid JSON"),
        ('{"prompts": []}', "must hold a list of prompts"),
        ('[{"text": "a"}]', 'entry 0 has no "caption"'),
        ('[{"caption": "a", "height": 0}]', 'entry 0: "height": 0 must be'),
        ('[{"caption": "a", "height": true}]', 'entry 0: "height": true must be'),
        ('[{"caption": "a", "width": 480.0}]', 'entry 0: "width": 480.0 must be'),
        ('[{"caption": "a", "width": -8}]', 'entry 0: "width": -8 must be'),
        ('[{"caption": "a", "width": NaN}]', 'entry 0: "width": NaN must be'),
        ('[{"caption": "a", "num_frames": 1' + "0" * 99 + "}]", "from 1 to 32768"),
        (
            '["a", {"caption": "a", "height": 8, "height": 9}]',
            "the key 'height' occurs twice in one entry",
        ),
        ('["a\\u0000b"]', "entry 0 holds a NUL character"),
        ("[" * 99_999, "nested too deeply"),
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


def test_prompts_from_json_lines(tmp_path):
    file = tmp_path / "prompts.JSONL"
    file.write_text('{"caption": "a\u2028cat", "height": 8}\r\n\n"a dog"\n', encoding="utf-8")
    assert read_prompts(file) == [Prompt(text="a\u2028cat", height=8), Prompt(text="a dog")]
    for line, said in (
        ("a dog", "is not valid JSON"),
        ("3", "has no"),
        ('{"height": 3}', "has no"),
    ):
        file.write_text(f'"a cat"\n\n{line}\n')
        with pytest.raises(ValueError, match=rf"prompts.JSONL, line 3 {said}"):
            read_prompts(file)


def test_the_mark_of_an_encoding_is_no_part_of_a_prompt(tmp_path):
    for name, said in (("a.txt", "a cat\r\ufeffa dog"), ("a.json", '["a cat", "a dog"]')):
        (tmp_path / name).write_text(said, encoding="utf-8-sig")
        found = [prompt.text for prompt in read_prompts(tmp_path / name)]
        assert found == ["a cat", "a dog"]
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
            (tmp_path / name).write_bytes(said.encode(encoding))
            with pytest.raises(ValueError, match=rf"--prompts_file .*{name}"):
                read_prompts(tmp_path / name)


@pytest.mark.parametrize("name", ["metadata.csv", "captions.TSV"])
def test_a_table_of_captions_is_no_list_of_prompts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("file_name,text\n0.png,a cat\n")
    with pytest.raises(ValueError, match=rf"--prompts_file .*{name} is a table"):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize("network", ["lumina2", "zimage"])
def test_sizes_beyond_the_tables_of_a_network_are_refused(network: str) -> None:
    """512 tokens of 16 x 16 pixels a side."""
    stride = LatentStride(stride=8, temporal_stride=1, side_cells=2, patch_temporal=1)
    config = SimpleNamespace(model=named_model(network))
    run: Any = SimpleNamespace(card={}, path="run", latent_stride=stride, config=config)
    sizes: Any = {"height": 16, "num_video_frames": 1}
    asked = GenerationOptions(width=8192, **sizes)
    assert options_of_prompt(asked, Prompt(text="a"), run).width == 8192
    with pytest.raises(
        ValueError, match=r"--width 8193 .* \(1, 2, 1026\), .* most .*--height 8192 --width 8192"
    ):
        options_of_prompt(replace(asked, width=8193), Prompt(text="a"), run)


DOCUMENT = {
    "data": [
        {"caption": "a cat", "height": 48, "width": 80, "num_frames": 5, "negative_prompt": "b"},
        {"prompt": "a dog", "video_path": None, "reference_path": ["x.png"]},
        "x\u2028y",
    ]
}
LINES = b"".join(json.dumps(entry).encode() + b"\n" for entry in DOCUMENT["data"])


def _read_or_refused(file: Path, content: bytes) -> list[Prompt]:
    file.write_bytes(content)
    try:
        prompts = read_prompts(file)
    except ValueError as error:
        assert str(file) in str(error) and len(str(error)) < 1000
        return []
    for one in prompts:
        assert isinstance(one.text, str) and "\0" not in one.text
        one.text.encode()
        for size in (one.height, one.width, one.num_video_frames):
            assert size is None or (type(size) is int and 1 <= size <= MOST_PIXELS)
        assert isinstance(unused([one]), str)
    return prompts


@given(json_bytes(DOCUMENT))
def test_hostile_prompts_as_json(tmp_path, content):
    _read_or_refused(tmp_path / "prompts.json", content)


@given(damaged(LINES) | mistaken(DOCUMENT["data"][0]).map(lambda one: json.dumps(one).encode()))
def test_hostile_prompts_as_json_lines(tmp_path, content):
    _read_or_refused(tmp_path / "prompts.jsonl", content)


@given(damaged("a cat\n\u4e2d $x$\r\n\ufeff\n".encode()) | st.binary() | st.text().map(str.encode))
def test_hostile_prompts_as_lines(tmp_path, content):
    for prompt in _read_or_refused(tmp_path / "prompts.txt", content):
        assert prompt.text and "\n" not in prompt.text and not prompt.text.startswith("\ufeff")


@pytest.mark.parametrize(
    "flags",
    [
        ("--seed", str(2**64)),
        ("--seed", str(2**64 - 1), "--num_images_per_prompt", "2"),
        ("--seed", str(-(2**64))),
        ("--num_images_per_prompt", "0"),
        ("--num_images_per_prompt", str(10**12)),
        ("--height", str(10**30)),
        ("--num_video_frames", str(2**31)),
        ("--num_steps", str(10**9)),
        ("--guidance", "inf"),
        ("--guidance_rescale", "nan"),
        ("--guidance_steps", "1.5"),
        ("--guidance_after", "3"),
        ("--guidance_after", "nan", "--guidance_steps", "0.5"),
        ("--guidance_least_norm", "-1"),
        ("--guidance_interval", "nan", "1"),
        ("--guidance_interval", "1", "0"),
        ("--width", "-8"),
        ("--fps", "1e-5"),
        ("--fps", "nan"),
        ("--fps", "1e300"),
        ("--audio_guidance", "nan"),
        ("--audio_guidance_rescale", "2"),
        ("--stg_scale", "inf", "--stg_blocks", "0"),
        ("--stg_scale", "1"),
        ("--stg_blocks", "0"),
        ("--audio_modality_scale", "1e9"),
    ],
)
def test_numbers_that_make_no_sense_are_named_before_anything_is_opened(tmp_path, flags):
    asked = ("--checkpoint_path", "nowhere", "--prompt", "a", "--output_dir", str(tmp_path / "o"))
    with pytest.raises(ValueError, match=f"^{flags[0]} "):
        generate_dit.main([*asked, *flags])
    assert not (tmp_path / "o").exists()


def test_a_file_of_prompts_that_is_not_there_or_empty(tmp_path):
    file = tmp_path / "prompts.txt"
    with pytest.raises(ValueError, match=rf"{file}.*does not exist"):
        read_prompts(file)
    file.write_text("\n \n")
    with pytest.raises(ValueError, match=rf"{file}.*write at least one"):
        read_prompts(file)


@pytest.mark.parametrize(
    "flags",
    [
        ("--seed", str(2**64 - 499)),
        ("--per_prompt", "0"),
        ("--num_steps", "-1"),
        ("--guidance", "nan"),
        ("--min_accuracy", "nan"),
    ],
)
def test_digits_are_not_judged_with_numbers_that_make_no_sense(flags):
    with pytest.raises(ValueError, match=f"^{flags[0]} "):
        evaluate_digits.main(["--checkpoint_path", "nowhere", *flags])


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
    steps = LatentStride(stride=8, temporal_stride=4, side_cells=2, patch_temporal=1)
    assert steps.latent(pixels) == latent and steps.pixels(latent) == made
    said = rounding(pixels, made)
    assert (not said) == (pixels == made)
    if pixels == (10, 240, 416):
        assert said.startswith("generates 13 frames instead of 10") and said.endswith("cut off")


def test_encoders_are_found_where_the_user_says(tmp_path):
    """The dataset was packed with a hub's model, which lies in a folder now."""
    folder = pipeline_parts.wan(tmp_path / "wan")
    made = vae.codec_of_card(_card(str(folder)))
    card = _card("Wan-AI/not-here")
    found = vae.codec_of_card(card, ModelLocation(cache=str(folder), local_only=True))
    latent = torch.randn(found.channels, 2, 4, 4)
    with found.visiting(torch.device("cpu")):
        assert torch.equal(found.decode(latent), made.decode(latent))
    assert LatentStride.of(found, DitConfig()).pixels((2, 4, 4))[0] == 5
    caption = text.text_encoder_of_card(
        card, ModelLocation(cache=str(folder), local_only=True)
    ).encode("a cat")
    assert torch.equal(caption, text.text_encoder_of_card(_card(str(folder))).encode("a cat"))
    with pytest.raises(CodecError, match="Wan-AI/not-here"):
        vae.codec_of_card(card, ModelLocation(local_only=True))


def _card(model: str) -> dict:
    part = {"model_name": model, "precision": "float32"}
    codec = {**part, "name": "wan", "stochastic": False, "image_conditioning": False}
    encoder = {**part, "name": "wan", "max_length": 32, "revision": "1"}
    latent = {"mean": [0.0] * 16, "std": [1.0] * 16}
    return {"format_version": 1, "processor": codec, "latent": latent, "text_encoder": encoder}


def test_pictures_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames as FastVideo names them, references by our name and by that of data_prep's tables."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("first.png", "here/last.png"):
        (tmp_path / name).write_bytes(b"")
    first, last = str(tmp_path / "first.png"), "last.png"
    frames = {"caption": "a", "image_path": "first.png", "last_image_path": "last.png"}
    entries = [
        frames,
        {"caption": "b", "image_path": None, "reference_path": "first.png"},
        {"caption": "c", "control_path": ["last.png", "first.png"]},
        {"caption": "d", "reference_path": first, "control_path": "gone.png"},
    ]
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"data": entries}))
    found = read_prompts(file)
    assert [(one.image, one.last_image) for one in found] == [(first, last), *[(None, None)] * 3]
    assert [one.references for one in found] == [(), (first,), (last, first), (first,)]
    assert [one.unused for one in found] == [(), (), (), ("control_path",)]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n\n".join(map(json.dumps, entries)))
    assert read_prompts(lines) == found
    for wrong, said in (
        ({"last_image_path": 3}, r'"last_image_path": 3 must name a picture$'),
        ({"sound_path": 3}, r'"sound_path": 3 must name a file$'),
        ({"frames_path": "gone.mp4"}, 'the file "gone.mp4" is neither in'),
        ({"image_path": ["first.png"]}, r'"image_path": .* must name a picture$'),
        ({"reference_path": ["first.png", 3]}, r'"reference_path": .*3\] must name a picture, or'),
        ({"reference_path": ["first.png", "x\0"]}, r'"reference_path": .* must name a picture, or'),
        (
            {"control_path": ["first.png", "gone.png"]},
            'the picture "gone.png" is neither in',
        ),
        ({"image_path": "x" * 5000}, r"the picture .*x\.\.\. is neither in"),
    ):
        lines.write_text('"a"\n\n' + json.dumps({"caption": "a"} | wrong))
        with pytest.raises(ValueError, match=rf"--prompts_file .*prompts.jsonl, line 3: {said}"):
            read_prompts(lines)
