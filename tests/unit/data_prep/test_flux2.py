"""FLUX.2, dev and klein: texts, latents and references against Diffusers' pipelines."""

# L tokens, E width

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, ProcessorMixin

from data_prep.cli.parser import main
from dit.codecs import text, vae
from dit.codecs.dataset_card import read_card
from dit.models.family import InputKind, SampleInput
from dit.sampling.given_pictures import GivenPictures
from tests.families import encoding, flux2_parts
from tests.media_files import image

CAPTIONS = ["a red bird [IMG] on a roof", "", "x" * 600]
PIPELINES = {"flux2": "Flux2Pipeline", "flux2_klein": "Flux2KleinPipeline"}
SIDES = [("flux2", "left"), ("flux2", "right"), ("flux2_klein", "left"), ("flux2_klein", "right")]


class TextProcessor(ProcessorMixin):
    """What PixtralProcessor does of captions; it inherits the functions, and needs torchvision."""

    def __init__(self, tokenizer: Any = None, chat_template: Any = None):
        super().__init__(tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("flux2")
    return {
        (name, side): getattr(flux2_parts, name)(root / name / side, side=side)
        for name, side in SIDES
    }


@pytest.fixture(scope="module")
def folder(folders) -> Path:
    return folders["flux2", "left"]


codec = partial(encoding.codec, "flux2")


def pipeline(name: str, folder: Path) -> Any:
    """The pipeline with its own parts, opened by Transformers and Diffusers."""
    import diffusers
    import transformers

    kind: str = encoding.encoder(name, folder).network
    network = getattr(transformers, kind).from_pretrained(folder, subfolder="text_encoder")
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    if name == "flux2":
        letters = TextProcessor(letters, letters.chat_template)
    kind_of_vae: Any = getattr(diffusers, "AutoencoderKLFlux2")  # noqa: B009  # of a lazy module
    return getattr(diffusers, PIPELINES[name])(
        scheduler=None, transformer=None, text_encoder=network.eval(), tokenizer=letters,
        vae=kind_of_vae.from_pretrained(folder, subfolder="vae"),
    )  # fmt: skip


@pytest.mark.parametrize("length", [None, 290])
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_texts_are_those_of_the_pipelines(folders, name, side, length) -> None:
    """All rows, those of padding too, wherever it is; the states of three layers in their order."""
    folder = folders[name, side]
    pipe, ours = pipeline(name, folder), encoding.encoder(name, folder, max_sequence_length=length)
    assert ours.width == 48
    rows, tokens = length or 512, list[int]()
    pipe.text_encoder.register_forward_pre_hook(
        lambda _, __, given: tokens.append(int(given["attention_mask"].sum())), with_kwargs=True
    )
    for caption in CAPTIONS:
        with torch.no_grad():
            expected, _ = pipe.encode_prompt(caption, max_sequence_length=rows)
        found = ours.embed(caption)["text"]
        assert found.shape == (rows, 48) and ours.rows_of(caption) == rows
        assert (found - expected[0]).abs().max() < 1e-5
        assert torch.equal(ours.encode(caption), expected[0].bfloat16())
        assert min(ours.count(caption), rows) == tokens.pop()
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])


@pytest.mark.parametrize("name", PIPELINES)
def test_the_card_rebuilds_codec_and_encoder(folders, name) -> None:
    folder = folders[name, "left"]
    words, model = encoding.encoder(name, folder), encoding.codec(name, folder)
    whitening = {"mean": list(model.whitening.mean), "std": list(model.whitening.std)}
    card = json.loads(json.dumps({
        "format_version": 1, "latent": whitening, "text_encoder": words.settings,
        "processor": {"name": model.name, **model.settings},
    }))  # fmt: skip
    assert vae.codec_of_card(card) == model and model.text_encoder == name
    assert text.text_encoder_of_card(card) == words
    assert card["text_encoder"]["padding"] == "keep"  # what model.text_pad_to=stored asks for


def pixels(width: int, height: int, seed: int = 0) -> torch.Tensor:
    """[3, 1, H, W] in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, 1, height, width, generator=generator) * 2 - 1


def test_latents_are_those_of_the_pipeline_and_decode_as_there(folder) -> None:
    """An odd number of cells; mean and deviation of each come from the batch norm's buffers."""
    pipe, model = pipeline("flux2", folder), codec(folder)
    shown = pixels(28, 20)
    with torch.no_grad():
        expected = pipe._encode_vae_image(shown[None, :, 0], generator=None)[0]
        std = (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
        plain = expected * std[:, None, None] + pipe.vae.bn.running_mean[:, None, None]
        decoded = pipe.vae.decode(pipe._unpatchify_latents(plain[None])).sample[0]
    found = model.whitening.apply(model.encode_raw(shown))
    assert (model.channels, model.stride, model.temporal_stride, model.patch) == (16, 4, 1, 1)
    assert found.shape == (16, 1, 5, 7)
    assert (found[:, 0] - expected).abs().max() < 1e-5
    assert (model.decode_raw(model.whitening.undo(found))[:, 0] - decoded).abs().max() < 1e-5
    both = model.encode_batch([shown, pixels(28, 20, seed=1)], keys=["a", "b"])
    assert (both[0]["latent"].float() - found).abs().max() < 2e-3


def test_published_sizes_are_those_of_the_pipeline() -> None:
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    for size in ((64, 64), (1000, 700), (1024, 1024), (2000, 1500), (1031, 1020), (640, 4999)):
        resized = Flux2ImageProcessor._resize_if_exceeds_area(Image.new("L", size)).size
        assert codec_class().reference_size(*size) == resized


def codec_class() -> Any:
    return vae.codec_named("flux2")


def as_the_pipeline(pipe: Any, picture: Image.Image, most: int) -> torch.Tensor:
    """Latent of a reference as `Flux2Pipeline.__call__` makes it, where `most` pixels are most."""
    shown = pipe.image_processor._resize_if_exceeds_area(picture, most)
    multiple = pipe.vae_scale_factor * 2
    width, height = (side // multiple * multiple for side in shown.size)
    (ready,) = pipe.image_processor.preprocess(shown, height, width, resize_mode="crop")
    with torch.no_grad():
        return pipe._encode_vae_image(ready[None], generator=None)[0]


@pytest.mark.parametrize("size", [(67, 70), (103, 61)])
def test_references_are_those_of_the_pipeline(
    folder, size, tmp_path: Path, monkeypatch, read_samples
) -> None:
    """Cropped to whole tokens, and scaled down before where they are large; both ways they come."""
    most = 70 * 70
    monkeypatch.setattr("dit.codecs.vae.flux2._MOST_PIXELS", most)
    image(tmp_path / "after/a.png", 32, 24, seed=1)
    file = image(tmp_path / "before/a.png", *size, seed=2)
    expected = as_the_pipeline(pipeline("flux2", folder), Image.open(file).convert("RGB"), most)
    options = ["--image_dir", tmp_path / "after", "--control_dir", tmp_path / "before"]
    options += ["--reference_size", "published", "--processor", "flux2", "--model_name", folder]
    options += ["--output_dir", tmp_path / "out", "--split", "1,0,0", "--num_workers", 0]
    options += ["--missing_caption", "filename"]
    assert main(["image", *map(str, options)]) == 0
    (sample,) = read_samples(tmp_path / "out").values()
    packed = sample["reference_latent_0"][:, 0].float()
    assert packed.shape == expected.shape and (packed - expected).abs().max() < 4e-3
    given = GivenPictures(references=(str(file),), reference_size="published")
    wanted = [SampleInput(name="reference_latent_0", kind=InputKind.REFERENCE, width=16)]
    found = given.inputs(codec(folder), wanted, size=(1, 32, 24), multiple=4)
    assert (found["reference_latent_0"][:, 0].float() - expected).abs().max() < 4e-3
    card = read_card(tmp_path / "out")
    assert (card["latent"]["channels"], card["latent"]["stride"]) == (16, 4)
    assert sample["text"].shape == (512, 48)
