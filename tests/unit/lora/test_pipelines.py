"""Diffusers' pipelines load what we write: our folder and, where they read such, ComfyUI's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from safetensors.torch import load_file
from torch import Tensor

from dit.lora.files import read_lora, write_lora
from dit.models.registry import diffusers_form
from tests.families.hidream import random_hidream
from tests.families.table import CASES
from tests.lora_files import linears, merged, model_of, random_factors

PIPELINES: dict[str, tuple[Any, str, Mapping[str, Any]]] = {
    name: (kind, family, changes)
    for family, case in CASES.items()
    for name, (kind, changes) in case.adapted_by.items()
}
"""The class of the pipeline, its family, what makes the tiny network one of it."""
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
    if issubclass(kind, ModularPipelineBlocks):
        pipe: Any = kind().init_pipeline()
        pipe.update_components(transformer=network)
        return pipe
    parts = dict.fromkeys(kind._get_signature_keys(kind)[0]) | {"transformer": network}
    if "processor" in parts:  # asked for tokens at once
        parts["processor"] = MagicMock()
    return kind(**parts)


@pytest.mark.usefixtures("resize")
@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipeline_loads_our_folder(name: str, tmp_path: Path) -> None:
    """With an adapter of every linear; our own reader has ComfyUI's file, too."""
    (kind, family, _), network = PIPELINES[name], _network(name)
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
    for file in [tmp_path] if CASES[family].unread_comfyui else [tmp_path, other]:
        pipe = _opened(kind, _network(name))
        pipe.load_lora_weights(str(file))
        made = _output(name, pipe.transformer, model)
        assert (made - wanted).abs().max() <= 1e-5 * wanted.abs().max()
