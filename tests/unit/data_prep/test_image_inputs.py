"""Inputs of image-to-video models are those that Diffusers' pipelines make of the same pictures."""

# N samples, C colour or latent channels, F frames, H rows, W columns

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from data_prep.cli.parser import main
from dit.batch import TEXT
from dit.codecs import text, vae
from dit.codecs.dataset_card import read_card
from dit.codecs.pretrained import PipelineComponent
from dit.codecs.vae.autoencoder import Autoencoder, picture_of
from dit.data.records import read_record
from dit.models.family import InputKind
from tests.families import encoding, pipeline_parts
from tests.media_files import image, video


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wan 2.1 with its image encoder, Wan 2.2 A14B without one, Wan 2.2 5B."""
    root = tmp_path_factory.mktemp("pipelines")
    makers = {"2.1": pipeline_parts.wan, "A14B": pipeline_parts.wan, "5B": pipeline_parts.wan22}
    found = {name: make(root / name) for name, make in makers.items()}
    index = {"_class_name": "WanImageToVideoPipeline", "vae": ["diffusers", "AutoencoderKLWan"]}
    index["image_encoder"] = [None, None]  # type: ignore[list-item] # as published
    (found["A14B"] / "model_index.json").write_text(json.dumps(index))
    return found


def codec(folder: Path, workload: str, name: str = "wan", **changes: Any) -> Autoencoder:
    return encoding.codec(name, folder, workload_type=workload, **changes)


def pipeline(folder: Path, **config: Any) -> Any:
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionModel

    kinds: dict[str, Any] = {
        "image_encoder": CLIPVisionModel,
        "image_processor": CLIPImageProcessor,
    }
    parts = {
        name: kind.from_pretrained(folder, subfolder=name) if (folder / name).exists() else None
        for name, kind in kinds.items()
    }
    autoencoder = AutoencoderKLWan.from_pretrained(folder, subfolder="vae")
    blank = {"tokenizer": None, "text_encoder": None, "transformer": None, "scheduler": None}
    return WanImageToVideoPipeline(vae=autoencoder, **blank, **parts, **config)


def clips(frames: int, count: int = 2, width: int = 64) -> Tensor:
    """Videos [N, C, F, 32, W] of the 256 levels of pictures."""
    draw = torch.Generator().manual_seed(frames)
    levels = torch.randint(256, (count, 3, frames, 32, width), generator=draw)
    return levels / 127.5 - 1


def prepared(pipe: Any, first: Tensor, last: Tensor | None, frames: int) -> Tensor:
    """The condition [N, C, F, H, W] of the pipeline; behind its 4 channels of mask, if any."""
    channels = pipe.vae.config.z_dim
    with torch.no_grad():
        size = first.shape[-2:]
        given = (len(first), channels, *size, frames, torch.float32, torch.device("cpu"))
        found = pipe.prepare_latents(first, *given, last_image=last)[1]
    return found if found.shape[1] == channels else found[:, 4:]


@pytest.mark.parametrize(("workload", "frames"), [("i2v", 13), ("i2v", 1), ("flf2v", 9)])
def test_conditions_are_those_of_the_pipeline(folders, workload: str, frames: int) -> None:
    model, pipe, shown = codec(folders["2.1"], workload), pipeline(folders["2.1"]), clips(frames)
    first, last = shown[:, :, 0], shown[:, :, -1] if workload == "flf2v" else None
    for n, together in enumerate(model.image_inputs(first, last, frames=frames)):
        given = [None if shown is None else shown[n : n + 1] for shown in (first, last)]
        (one,) = model.image_inputs(*given, frames=frames)
        condition = prepared(pipe, *given, frames)[0]
        assert condition.shape == (16, 1 + (frames - 1) // 4, 4, 8) and condition.std() > 0.01
        assert (one["condition_latent"] - condition).abs().max() < 1e-6
        pictures = [picture_of(picture[0]) for picture in given if picture is not None]
        with torch.no_grad():
            states = pipe.encode_image(pictures, torch.device("cpu"))
        assert one["image_embed"].shape == (5 * len(pictures), 16)
        assert (one["image_embed"] - states.flatten(0, 1)).abs().max() < 1e-6
        assert all((one[name] - together[name]).abs().max() < 1e-5 for name in together)
    found = model.image_inputs(first, last, frames=frames)
    # What is stored is this, in half precision; the first frame of the latent is that of the clip.
    stored = model.encode_batch(list(shown), keys=["a", "b"])
    for parts, one in zip(stored, found, strict=True):
        assert all(torch.equal(parts[name], value.half()) for name, value in one.items())
        assert (parts["latent"][:, :1] - parts["first_frame_latent"]).abs().max() < 2e-3
    if frames > 1:  # beyond the first frame the condition depends on the picture, too
        later = [one["condition_latent"][:, 1:] for one in found]
        assert (later[0] - later[1]).abs().max() > 1e-3


def test_the_first_frame_of_5b_is_that_of_its_pipeline(folders) -> None:
    model, shown = codec(folders["5B"], "i2v"), clips(9)
    assert (model.channels, model.stride, model.temporal_stride) == (48, 16, 4)
    pipe = pipeline(folders["5B"], expand_timesteps=True)
    for first in shown[:, :, 0]:
        (one,) = model.image_inputs(first[None], None, frames=9)
        expected = prepared(pipe, first[None], None, 9)
        assert one.keys() == {"first_frame_latent"} and expected.shape == (1, 48, 1, 2, 4)
        assert (one["first_frame_latent"] - expected[0]).abs().max() < 1e-6


def test_a_model_without_image_encoder_is_named(folders) -> None:
    model = codec(folders["A14B"], "i2v")
    assert model.input_names == ("condition_latent", "first_frame_latent")
    assert "no image_embed" in model.notices[0] and str(folders["A14B"]) in model.notices[0]
    (parts,) = model.encode_batch([clips(5)[0]], keys=["a"])
    assert parts.keys() == {"latent", "condition_latent", "first_frame_latent"}
    assert not codec(folders["2.1"], "i2v").notices + codec(folders["5B"], "i2v").notices


def pack(out: Path, source: Path, folder: Path, *options: object) -> int:
    words = ["video", "--video_dir", source, "--image_dir", source, "--output_dir", out]
    words += ["--model_name", folder, "--num_workers", 0, "--split", "1,0,0", *options]
    if "--processor" not in options:
        words += ["--processor", "wan"]
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of 11 frames and a picture, both 64 x 32."""
    folder = tmp_path_factory.mktemp("media")
    video(folder / "clip.mp4", 11, size=(64, 32))
    image(folder / "still.png", 64, 32)
    return folder


def planned_bytes(out: Path) -> int:
    return json.loads((out / "plan_summary.json").read_text())["expected_bytes"]


@pytest.mark.parametrize(("model", "workload"), [("2.1", "i2v"), ("2.1", "flf2v"), ("5B", "i2v")])
def test_one_shard_trains_both_ways(
    folders, media: Path, tmp_path: Path, read_samples, model: str, workload: str
) -> None:
    out, folder = tmp_path / "out", folders[model]
    for kind in ("t2v", workload):
        options = ["--workload_type", kind, "--plan=quick"]
        assert pack(tmp_path / kind, media, folder, *options) == 0
    assert pack(out, media, folder, "--workload_type", workload, "--batch_size", 2) == 0
    samples = read_samples(out)
    by_frames = {sample["num_frames"]: sample for sample in samples.values()}
    assert by_frames.keys() == {1, 9}
    cells, channels = ((2, 4), 48) if model == "5B" else ((4, 8), 16)
    frames, rows = (1 if model == "5B" else 3), (10 if workload == "flf2v" else 5)
    shapes = {"first_frame_latent": (channels, 1, *cells)}
    if model != "5B":
        shapes |= {"condition_latent": (channels, frames, *cells), "image_embed": (rows, 16)}
    clip, still = by_frames[9], by_frames[1]
    assert clip["latent"].shape == (channels, 3, *cells)
    assert {name: tuple(clip[name].shape) for name in shapes} == shapes
    assert {name: still[name].shape[1] for name in shapes} == {  # a clip of one frame
        name: 16 if name == "image_embed" else 1 for name in shapes
    }
    extra = sum(s[name].nbytes for s in samples.values() for name in shapes if name in s)
    assert planned_bytes(tmp_path / workload) - planned_bytes(tmp_path / "t2v") == extra > 0
    # The null text has no picture: a dropped caption leaves the sample its own.
    null = load_file(out / "null_text.safetensors")
    words = text.text_encoder_of_card(read_card(out))
    assert null.keys() == {"text"} and torch.equal(null["text"], words.encode(""))
    kinds = {TEXT: InputKind.TEXT, "first_frame_latent": InputKind.FRAMES}
    kinds |= {"condition_latent": InputKind.CHANNELS, "image_embed": InputKind.TEXT}
    parts = {"safetensors": clip["payload"], "json": json.dumps({"fps": None}).encode()}
    assert read_record(parts).inputs.keys() == {TEXT}
    record = read_record(parts, kinds)
    assert record.inputs.keys() == {TEXT, *shapes} and not record.unknown
    rebuilt = vae.codec_of_card(read_card(out))
    assert isinstance(rebuilt, Autoencoder) and rebuilt.last_frame == (workload == "flf2v")
    assert rebuilt.decode(clip["latent"]).shape == (9, 32, 64, 3)
    assert main(["inspect", str(out)]) == 0


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("5B", ("--workload_type", "flf2v"), "reads only the first frame; give i2v"),
        ("5B", ("--height", 48, "--width", 64), "multiple of 32 pixels, such as 64"),
        ("5B", ("--size_multiple", 24), "--size_multiple 24 must be a multiple of the 16"),
        ("2.1", ("--height", 40, "--width", 64), "multiple of 16 pixels, such as 32"),
        ("2.1", ("--target_frames", 16), "takes 4n + 1; give 13 or 17"),
        ("2.1", ("--processor", "cosmos_predict2", "--workload_type", "i2v"), "it; give t2v"),
        ("2.1", ("--processor", "hunyuan", "--workload_type", "flf2v"), "give t2v or i2v"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_remedy(
    folders, media: Path, tmp_path: Path, capsys, model: str, options: tuple, said: str
) -> None:
    assert pack(tmp_path / "out", media, folders[model], *options) == 1
    assert said in capsys.readouterr().err


def test_a_dataset_without_conditions_is_not_continued_with_them(
    folders, media: Path, tmp_path: Path, capsys
) -> None:
    assert pack(tmp_path / "out", media, folders["2.1"]) == 0
    assert pack(tmp_path / "out", media, folders["2.1"], "--workload_type", "i2v") == 1
    assert "holds samples of other options" in capsys.readouterr().err
    # i2v of older versions wrote no conditions: its options, which had no names, are others, too.
    names = ["condition_latent", "first_frame_latent", "image_embed"]
    assert codec(folders["2.1"], "i2v").settings["inputs"] == names
    assert "inputs" not in codec(folders["2.1"], "t2v").settings


def test_a_number_beyond_half_precision_is_refused(
    folders, media: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    from dit.codecs.vae.families import Wan

    states = Wan.features_of
    monkeypatch.setattr(Wan, "features_of", lambda self, answer: 1e6 * states(self, answer))
    assert pack(tmp_path / "out", media, folders["2.1"], "--workload_type", "i2v") == 1
    assert "latent has NaN or Inf" in capsys.readouterr().err
    assert "wan made image_embed from" in (tmp_path / "out/refused.jsonl").read_text()


def test_default_models_have_what_their_workload_needs(monkeypatch) -> None:
    asked = list[str]()

    def config_of(part: PipelineComponent) -> dict[str, Any]:
        asked.append(part.model)
        return {"z_dim": 1, "latents_mean": [0], "latents_std": [1]}

    monkeypatch.setattr("dit.codecs.vae.autoencoder.model_config_of", config_of)
    for workload in ("t2v", "i2v", "flf2v"):
        codec(Path(), workload, model_name=None)
    assert [name.split("-")[2] for name in dict.fromkeys(asked)] == ["T2V", "I2V", "FLF2V"]


def test_cosmos_predict2_latents_are_those_of_its_pipeline(folders) -> None:
    """Latents of the given frames are the first of the clip's own: the codec is causal."""
    from diffusers import (
        AutoencoderKLWan,
        Cosmos2VideoToWorldPipeline,
        FlowMatchEulerDiscreteScheduler,
    )

    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    autoencoder = AutoencoderKLWan.from_pretrained(folders["2.1"], subfolder="vae")
    pipe = Cosmos2VideoToWorldPipeline(
        text_encoder=None, tokenizer=None, transformer=None, vae=autoencoder, scheduler=scheduler,
        safety_checker=torch.nn.Identity(),
    )  # fmt: skip
    model, shown = codec(folders["2.1"], "t2v", "cosmos_predict2"), clips(9, 1)
    autoencoder.encode = lambda x, encode=autoencoder.encode: Namespace(latents=encode(x)[0].mode())
    with torch.no_grad():
        given = pipe.prepare_latents(
            shown[:, :, :5], 1, 16, 32, 64, 9, True, torch.float32, torch.device("cpu")
        )[1]
    latent = model.whitening.apply(model.encode_raw(shown[0]))
    assert (latent[:, :2] - given[0, :, :2]).abs().max() < 1e-5
    assert model.text_encoder == "cosmos" and model.patch * model.stride == 16


def test_a_picture_is_8_bit_levels() -> None:
    levels = torch.arange(256).view(1, 16, 16).repeat(3, 1, 1)
    shown = picture_of(levels / 127.5 - 1)
    assert isinstance(shown, Image.Image) and shown.tobytes() == bytes(
        value for level in range(256) for value in [level] * 3
    )
