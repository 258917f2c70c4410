"""Diffusers' pipelines load what we write: our folder and, where they read such, ComfyUI's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from diffusers.modular_pipelines.anima.modular_blocks_anima import AnimaAutoBlocks
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3AutoBlocks
from diffusers.pipelines.ernie_image.pipeline_ernie_image import ErnieImagePipeline
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from diffusers.pipelines.hidream_image.pipeline_hidream_image import HiDreamImagePipeline
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import Ideogram4Pipeline
from diffusers.pipelines.krea2.pipeline_krea2 import Krea2Pipeline
from diffusers.pipelines.lumina2.pipeline_lumina2 import Lumina2Pipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import QwenImage21Pipeline
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from safetensors.torch import load_file
from torch import Tensor

from dit.lora.files import read_lora, write_lora
from dit.models.registry import diffusers_form
from tests.families.dit import NETWORKS
from tests.families.hidream import random_hidream
from tests.families.table import CASES
from tests.lora_files import linears, merged, model_of, random_factors

PIPELINES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "flux2": (Flux2Pipeline, "flux2", {}),
    "klein": (Flux2KleinPipeline, "flux2", {"guidance_embeds": False}),
    "qwen_image": (QwenImagePipeline, "qwen_image", {}),
    "lumina2": (Lumina2Pipeline, "lumina2", {}),
    "zimage": (ZImagePipeline, "zimage", {}),
    "hidream": (HiDreamImagePipeline, "hidream", {"max_resolution": (16, 16)}),
    "flux3": (Flux3AutoBlocks, "flux3", {}),
    "anima": (AnimaAutoBlocks, "dit", NETWORKS["images"]),
    "ernie_image": (ErnieImagePipeline, "ernie_image", {}),
    "krea2": (Krea2Pipeline, "krea2", {}),
    "ideogram4": (Ideogram4Pipeline, "ideogram4", {}),
    "qwen_image21": (QwenImage21Pipeline, "qwen_image21", {}),
}
"""The class of the pipeline, its family, what makes the tiny network one of it."""
UNREAD_OF_COMFYUI = {"lumina2", "zimage", "flux3", "ideogram4"}
TURNED = "norm_out.linear"
"""Diffusers reads FLUX.2's of ComfyUI as if scale and shift of this one stood as in its own."""


def _network(name: str) -> Any:
    _, family, changes = PIPELINES[name]
    return (random_hidream if family == "hidream" else CASES[family].random)(**changes)


def _random(value: Any, rng: torch.Generator) -> Any:
    """An argument with random numbers in the place of its zeros; integers are masks."""
    if isinstance(value, list):
        return [_random(one, rng) for one in value]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=rng)


@torch.no_grad()
def _output(name: str, network: Any, model: Any) -> Tensor:
    case, rng = CASES[PIPELINES[name][1]], torch.Generator().manual_seed(5)
    arguments = {key: _random(value, rng) for key, value in case.arguments(model).items()}
    (made,) = network(**{case.level: torch.tensor([0.4])}, **arguments, return_dict=False)
    return made[0]


def _opened(kind: Any, network: Any) -> Any:
    if kind in (AnimaAutoBlocks, Flux3AutoBlocks):
        pipe: Any = kind().init_pipeline()
        pipe.update_components(transformer=network)
        return pipe
    parts = dict.fromkeys(kind._get_signature_keys(kind)[0]) | {"transformer": network}
    if kind is QwenImage21Pipeline:  # asks it for tokens at once
        parts["processor"] = MagicMock()
    return kind(**parts)


@pytest.mark.usefixtures("resize")
@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_loads_our_folder(name: str, tmp_path: Path) -> None:
    """With an adapter of every linear; our own reader has ComfyUI's file, too."""
    kind, network = PIPELINES[name][0], _network(name)
    model = model_of(network, pipeline="AnimaModularPipeline" if name == "anima" else None)
    shapes = linears(network)
    if kind in (Flux2Pipeline, Flux2KleinPipeline):
        del shapes[TURNED]
    factors = random_factors(shapes, alphas={"to_q": 2.0})
    names = diffusers_form(model).comfyui_names
    assert names is not None
    write_lora(tmp_path, factors, comfyui_names=names(model))
    other = tmp_path / "comfyui" / "lora.safetensors"
    assert all(key.startswith("diffusion_model.") for key in load_file(other))
    found = read_lora(other, model)
    for key, one in factors.items():
        torch.testing.assert_close(found[key].product(), one.product())
    wanted = _output(name, merged(network, factors), model)
    for file in [tmp_path] if name in UNREAD_OF_COMFYUI else [tmp_path, other]:
        pipe = _opened(kind, _network(name))
        pipe.load_lora_weights(str(file))
        made = _output(name, pipe.transformer, model)
        assert (made - wanted).abs().max() <= 1e-5 * wanted.abs().max()
