"""Adapters of FLUX.2 in the names of other tools, against Diffusers' own reading of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_kohya_flux2_lora_to_diffusers,
    _convert_non_diffusers_flux2_lora_to_diffusers,
)
from safetensors.torch import save_file

from dit.lora.files import read_lora
from dit.models.flux2.diffusers import FLUX2_NAMES
from dit.models.registry import named_model
from tests.families.flux2 import random_flux2
from tests.lora_files import check_read_as, comfyui, kohya, linears, random_factors

HEAD = "norm_out.linear"
"""Diffusers reads a file of ComfyUI as if scale and shift of this one stood as in its own."""


@pytest.mark.parametrize("tool", ["comfyui", "ai-toolkit", "kohya"])
def test_files_of_other_tools(tool: str, tmp_path: Path) -> None:
    """Linears of the original code; q, k and v of a block are one there."""
    alone = {k: ours.rstrip("~") for k, ours in FLUX2_NAMES.items() if "norm_out" not in ours}
    numbered = {
        k.replace("*", n): ours.replace("*", n) for k, ours in alone.items() for n in ("0", "1")
    }
    own = linears(random_flux2())
    shapes = {
        k: (sum(own[one][0] for one in ours.split()), own[ours.split()[0]][1])
        for k, ours in numbered.items()
    }
    factors, names = random_factors(shapes), {name: name for name in shapes}
    if tool == "kohya":
        unread = ("modulation", "guidance_in")  # by Diffusers
        factors = {k: one for k, one in factors.items() if not any(x in k for x in unread)}
        content = kohya(factors, names)
        theirs = _convert_kohya_flux2_lora_to_diffusers(dict(content))
    else:
        content = comfyui(factors, names, alphas=False)
        theirs = _convert_non_diffusers_flux2_lora_to_diffusers(dict(content))
    if tool == "ai-toolkit":
        content |= comfyui(factors, names, alphas=True)
        content = {k: 4.0 * torch.ones(()) if "alpha" in k else x for k, x in content.items()}
    save_file(content, tmp_path / "other.safetensors")
    found = read_lora(tmp_path / "other.safetensors", named_model("flux2_dev"))
    check_read_as(found, theirs)
    assert len(found) == sum(len(numbered[k].split()) for k in factors)


def test_the_last_modulation_of_a_file_of_comfyui_is_turned_round(tmp_path: Path) -> None:
    shape = {"final_layer.adaLN_modulation.1": linears(random_flux2())[HEAD]}
    factors = random_factors(shape)
    save_file(comfyui(factors, {k: k for k in shape}, alphas=False), tmp_path / "x.safetensors")
    (one,) = read_lora(tmp_path / "x.safetensors", named_model("flux2_dev")).values()
    (theirs,) = factors.values()
    product = theirs.up @ theirs.down
    torch.testing.assert_close(one.product(), torch.cat(product.chunk(2)[::-1]))
