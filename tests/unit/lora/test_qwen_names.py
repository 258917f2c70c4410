"""Adapters of Qwen-Image in the names of other tools, against Diffusers' own reading of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_qwen_lora_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dit.lora.files import read_lora, write_lora
from dit.models.qwen_image.diffusers import LINEARS
from tests.lora_files import linears, merged, random_factors
from tests.qwen_pipelines import random_qwen_image


@torch.no_grad()
def output(network: Any) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    return network(
        hidden_states=torch.randn(1, 6, 64, generator=rng),
        timestep=torch.tensor([0.4]),
        encoder_hidden_states=torch.randn(1, 5, 16, generator=rng),
        img_shapes=[[(1, 2, 3)]],
    ).sample


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any], Tensor]:
    """A folder of ours with an adapter of every linear, and what the merged network makes."""
    network = random_qwen_image()
    factors = random_factors(linears(network), alphas={"to_q": 2.0})
    write_lora(tmp_path, factors, comfyui_names=LINEARS)
    return tmp_path, factors, output(merged(network, factors))


def assert_close(network: nn.Module, wanted: Tensor) -> None:
    assert (output(network) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_pipeline_loads_our_folder_and_the_file_for_comfyui(written) -> None:
    folder, _, wanted = written
    stored = load_file(folder / "comfyui" / "lora.safetensors")
    assert all(key.startswith("diffusion_model.") for key in stored)
    for given in (str(folder), stored):
        parts: Any = dict.fromkeys(("vae", "text_encoder", "tokenizer", "scheduler"))
        pipe = QwenImagePipeline(transformer=random_qwen_image(), **parts)
        pipe.load_lora_weights(given)
        assert_close(pipe.transformer, wanted)


@pytest.mark.parametrize("dialect", ["dots", "underscores"])
def test_files_of_other_tools(written, dialect: str) -> None:
    """Of diffusion-pipe and of musubi-tuner, which writes alphas beside."""
    folder, factors, wanted = written
    prefix = "diffusion_model." if dialect == "dots" else "lora_unet_"
    content = {}
    for module, one in factors.items():
        name = prefix + (module if dialect == "dots" else module.replace(".", "_"))
        names = ("lora_A", "lora_B") if dialect == "dots" else ("lora_down", "lora_up")
        content |= {f"{name}.{names[0]}.weight": one.down, f"{name}.{names[1]}.weight": one.up}
        content[f"{name}.alpha"] = torch.tensor(one.alpha)
    save_file(content, folder / "other.safetensors")
    found = read_lora(folder / "other.safetensors")
    theirs = _convert_non_diffusers_qwen_lora_to_diffusers(dict(content))
    assert (
        found.keys()
        == factors.keys()
        == {k.partition(".lora_")[0].removeprefix("transformer.") for k in theirs}
    )
    assert_close(merged(random_qwen_image(), found), wanted)
