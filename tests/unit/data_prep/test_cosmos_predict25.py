"""Texts of Cosmos-Predict2.5: the states of all layers, or the projection of these."""

# L tokens, E width

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.cli.parser import main
from dit.codecs import text
from dit.codecs.dataset_card import CodecError, read_card
from dit.codecs.text.families import CosmosPredict25Text
from tests.families import encoding, pipeline_parts
from tests.media_files import image

CAPTION = "a cat jumps"
ROWS, LAYERS, WIDTH, PROJECTED = 512, 3, 16, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_parts.cosmos25(tmp_path_factory.mktemp("cosmos25"))


encoder = partial(encoding.encoder, "cosmos_predict25")


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """[L, E] as the pipeline makes them."""
    from diffusers import AutoencoderKLWan, Cosmos2_5_PredictBasePipeline
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    kinds: dict[str, Any] = {"text_encoder": Qwen2_5_VLForConditionalGeneration}
    kinds |= {"tokenizer": AutoTokenizer, "vae": AutoencoderKLWan}
    parts = {name: kind.from_pretrained(folder, subfolder=name) for name, kind in kinds.items()}
    blank: dict[str, Any] = {"transformer": None, "scheduler": None}
    pipe = Cosmos2_5_PredictBasePipeline(**parts, **blank, safety_checker=torch.nn.Identity())
    with torch.no_grad():
        options = {"do_classifier_free_guidance": False, "device": torch.device("cpu")}
        return pipe.encode_prompt(CAPTION, **options)[0][0]


def test_all_layers_are_those_of_the_pipeline(folder: Path, expected: torch.Tensor) -> None:
    ours = encoder(folder)
    found = ours.embed(CAPTION)["text"]
    assert found.shape == (ROWS, LAYERS * WIDTH) == (ROWS, ours.width)
    assert (found - expected).abs().max() < 1e-6
    each = found.view(ROWS, LAYERS, WIDTH)  # each layer is normalised by itself
    assert each.mean(-1).abs().max() < 1e-5 and (each.std(-1) - 1).abs().max() < 1e-4
    assert ours.encode(CAPTION).dtype == torch.bfloat16
    # The rows of the padding behind a caption see it, so no two captions share them.
    other = ours.embed("a dog jumps")["text"]
    assert (found[-9:] - other[-9:]).abs().max() > 1e-3


def test_the_projection_is_that_of_the_transformer(folder: Path, expected: torch.Tensor) -> None:
    from diffusers import CosmosTransformer3DModel

    transformer = CosmosTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    ours = encoder(folder, text_projection=folder / "transformer")
    with torch.no_grad():
        projected = transformer.crossattn_proj(expected)
        found = ours.embed(CAPTION)["text"]
    assert found.shape == (ROWS, PROJECTED) == (ROWS, ours.width)
    assert (found - projected).abs().max() < 1e-6 < projected.std() / 100


def test_what_is_no_projection_of_this_encoder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="give the folder transformer"):
        encoder(folder, text_projection=folder / "vae")
    weights = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    weights["crossattn_proj.0.weight"] = torch.ones(PROJECTED, 40)
    save_file(weights, tmp_path / "a.safetensors")
    with pytest.raises(CodecError, match="takes 40 numbers a token, but"):
        encoder(folder, text_projection=tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CodecError, match="--text_projection"):
        encoder(folder, text_projection=tmp_path)


@pytest.mark.parametrize("is_projected", [False, True])
def test_plan_packing_and_card(
    folder: Path, tmp_path: Path, read_samples, capsys, is_projected: bool
) -> None:
    for index in range(2):
        image(tmp_path / f"in/{index}.png", 48, 32, seed=index)
    words = ["image", "--image_dir", tmp_path / "in", "--output_dir", tmp_path / "out"]
    words += ["--processor", "cosmos_predict25", "--model_name", folder, "--split", "1,0,0"]
    words += ["--num_workers", 0]
    words += ["--text_projection", folder / "transformer"] if is_projected else []
    assert main([str(word) for word in [*words, "--plan=quick"]]) == 0
    planned = json.loads((tmp_path / "out/plan_summary.json").read_text())["expected_bytes"]
    assert main([str(word) for word in words]) == 0
    assert "not used" not in capsys.readouterr().out
    samples = read_samples(tmp_path / "out").values()
    width = PROJECTED if is_projected else LAYERS * WIDTH
    assert all(sample["text"].shape == (ROWS, width) for sample in samples)
    assert planned == sum(sample[name].nbytes for sample in samples for name in ("latent", "text"))
    null = load_file(tmp_path / "out/null_text.safetensors")
    rebuilt = text.text_encoder_of_card(read_card(tmp_path / "out"))
    assert torch.equal(null["text"], rebuilt.encode("")) and null["text"].shape == (ROWS, width)


def test_the_bytes_of_a_caption_are_said(folder: Path) -> None:
    large = encoder(folder, max_sequence_length=2**15)
    assert large.notices[0].startswith("each caption takes 3 MB (32768 tokens of 48 numbers)")
    assert not encoder(folder).notices
    assert not encoder(folder, text_projection=folder / "transformer").notices
    assert not encoder(folder).is_cut("x" * 400) and encoder(folder).is_cut("x" * 500)


def test_a_revision_of_the_hub_is_asked_for() -> None:
    from dit.codecs.pretrained import PipelineComponent

    part = PipelineComponent(
        library="diffusers", kind="AutoencoderKLWan", subfolder="vae",
        model=CosmosPredict25Text.default_model,
    )  # fmt: skip
    assert part.place == "nvidia/Cosmos-Predict2.5-2B"
    assert part.where["revision"] == "diffusers/base/post-trained"
