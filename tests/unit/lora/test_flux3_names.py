"""Adapters of FLUX.3 in the names of other tools, against Diffusers' own reading of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_flux3_lora_to_diffusers
from safetensors.torch import save_file

from dit.config import LoraConfig
from dit.lora.files import read_lora
from dit.lora.targets import chosen_adapters
from dit.models.flux3.diffusers import FLUX3_NAMES
from dit.models.registry import named_model
from tests.families.flux3 import random_flux3
from tests.lora_files import check_read_as, comfyui, linears, random_factors

BLOCKS = ("txt_mode_blocks", "content_mode_blocks", "single_blocks")
"""What Diffusers reads of such a file."""


@pytest.mark.parametrize("tool", ["comfyui", "ai-toolkit"])
def test_files_of_other_tools(tool: str, tmp_path: Path) -> None:
    """Linears of the original code; ai-toolkit writes alphas, which Diffusers does not read."""
    numbered = {
        name.replace("*", n): ours.replace("*", n)
        for name, ours in FLUX3_NAMES.items()
        for n in ("0", "1")
    }
    own = linears(random_flux3(flow_map=True))
    assert {ours.rstrip("~") for ours in numbered.values()} == own.keys()
    shapes = {name: own[ours] for name, ours in numbered.items() if name.startswith(BLOCKS)}
    factors, names = random_factors(shapes), {name: name for name in shapes}
    content = comfyui(factors, names, alphas=False)
    theirs = _convert_non_diffusers_flux3_lora_to_diffusers(dict(content))
    if tool == "ai-toolkit":
        content |= comfyui(factors, names, alphas=True)
        content = {k: 4.0 * torch.ones(()) if "alpha" in k else x for k, x in content.items()}
    save_file(content, tmp_path / "other.safetensors")
    found = read_lora(tmp_path / "other.safetensors", named_model("flux3_klein"))
    check_read_as(found, theirs)
    assert len(found) == len(shapes)


def test_words_of_adapters_mean_the_linears_of_all_layers() -> None:
    """SimpleTuner's are those of attention."""
    model = named_model("flux3_klein_base")
    found = {
        word: {*chosen_adapters(model, LoraConfig(rank=2, targets=(word,)))}
        for word in ("attention", "mlp", "*stream_modulations.*")
    }
    blocks = [f"{kind}.{n}" for n in range(28) for kind in ("single_transformer_blocks",)]
    kinds = ("txt_mode_blocks", "mode_blocks.image", "mode_blocks.image_cond")
    blocks += [f"{kind}.{n}" for n in range(5) for kind in kinds]
    names = ("to_q", "to_k", "to_v", "to_out.0")
    assert found["attention"] == {f"{block}.attn.{name}" for block in blocks for name in names}
    assert found["mlp"] == {f"{block}.ff.linear_{end}" for block in blocks for end in ("in", "out")}
    assert len(found["*stream_modulations.*"]) == 6
