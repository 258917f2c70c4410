"""Adapters of Qwen-Image in the names of other tools, against Diffusers' own reading of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_qwen_lora_to_diffusers
from safetensors.torch import save_file

from dit.lora.files import read_lora
from tests.families.qwen_image import random_qwen_image
from tests.lora_files import check_read_as, comfyui, kohya, linears, random_factors


@pytest.mark.parametrize("tool", ["diffusion-pipe", "musubi-tuner"])
def test_files_of_other_tools(tool: str, tmp_path: Path) -> None:
    """With alphas beside."""
    factors = random_factors(linears(random_qwen_image()), alphas={"to_q": 2.0})
    names = {name: name for name in factors}
    content = kohya(factors, names)
    if tool == "diffusion-pipe":
        content = comfyui(factors, names, alphas=True)
    save_file(content, tmp_path / "other.safetensors")
    found = read_lora(tmp_path / "other.safetensors")
    check_read_as(found, _convert_non_diffusers_qwen_lora_to_diffusers(dict(content)))
    assert found.keys() == factors.keys()
    for name, one in found.items():
        torch.testing.assert_close(one.product(), factors[name].product())
