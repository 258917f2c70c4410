"""Adapters of Lumina Image 2.0 in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path

from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_lumina2_lora_to_diffusers
from safetensors.torch import save_file

from dit.lora.files import read_lora
from dit.models.lumina2.diffusers import LUMINA2_NAMES
from dit.models.registry import named_model
from tests.lora_files import check_read_as, comfyui, random_factors


def test_files_of_comfyui_and_diffusion_pipe(tmp_path: Path) -> None:
    """Queries, keys and values are one linear there, of 2304, 768 and 768 outputs."""
    model = named_model("lumina2")
    stacks = ("noise_refiner", "context_refiner", "layers")
    names = [k.replace("*", "0") for k in LUMINA2_NAMES if k.startswith(stacks)]
    sides = {"qkv": (3840, 2304), "out": (2304, 2304), "w2": (2304, 9216), "1": (9216, 1024)}
    shapes = {name: sides.get(name.rpartition(".")[2], (9216, 2304)) for name in names}
    content = comfyui(random_factors(shapes), {name: name for name in names}, alphas=False)
    theirs = _convert_non_diffusers_lumina2_lora_to_diffusers(dict(content))
    save_file(content, tmp_path / "other.safetensors")
    found = read_lora(tmp_path / "other.safetensors", model)
    check_read_as(found, theirs)
