"""Adapters of HiDream-I1 in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.hidream_image.pipeline_hidream_image import HiDreamImagePipeline
from safetensors.torch import load_file, save_file

from dit.lora.files import read_lora, write_lora
from dit.models.hidream.diffusers import HIDREAM_NAMES
from dit.models.linears import matrices_of_linears, their_modules
from dit.models.registry import family_named
from tests.families.hidream import random_hidream
from tests.lora_files import comfyui, kohya, linears, merged, random_factors


@torch.no_grad()
def output(network: Any) -> torch.Tensor:
    rng = torch.Generator().manual_seed(5)
    given = (
        torch.randn(*size, generator=rng) for size in ((1, 4, 4, 6), (1, 3, 16), (3, 1, 3, 20))
    )
    latent, text, states = given
    told, pooled = torch.tensor([400.0]), torch.randn(1, 10, generator=rng)
    return network(latent, told, text, states, pooled, return_dict=False)[0]


def test_the_pipeline_loads_our_folder(tmp_path: Path) -> None:
    """And what ComfyUI, ai-toolkit and diffusion-pipe call it, Diffusers' names behind a prefix."""
    network = random_hidream()
    factors = random_factors(linears(network), alphas={"to_q": 2.0})
    write_lora(tmp_path, factors, comfyui_names=HIDREAM_NAMES)
    wanted, parts = output(merged(network, factors)), {}
    for kind in HiDreamImagePipeline._get_signature_keys(HiDreamImagePipeline)[0]:
        parts[kind] = None
    for name in ("pytorch_lora_weights", "comfyui/lora"):
        network = random_hidream()
        pipe = HiDreamImagePipeline(**parts | {"transformer": network})
        pipe.load_lora_weights(load_file(tmp_path / f"{name}.safetensors"))
        assert (output(pipe.transformer) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    names = load_file(tmp_path / "comfyui" / "lora.safetensors")
    assert all(name.startswith("diffusion_model.") for name in names)


def test_files_of_other_tools_name_every_linear_but_routers(tmp_path: Path) -> None:
    network = random_hidream()
    factors = random_factors(linears(network))
    config: Any = family_named("hidream").config
    model = config(num_layers=2, num_single_layers=3)
    known = {name for pair in matrices_of_linears(model) for name in their_modules(pair)}
    assert known == factors.keys()
    names = {name: name for name in factors}
    for content in (comfyui(factors, names, alphas=True), kohya(factors, names)):
        save_file(content, tmp_path / "other.safetensors")
        found = read_lora(tmp_path / "other.safetensors", model)
        assert found.keys() == factors.keys()
        for name, one in found.items():
            torch.testing.assert_close(one.product(), factors[name].product())
