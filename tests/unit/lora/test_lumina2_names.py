"""Adapters of Lumina Image 2.0 in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_lumina2_lora_to_diffusers
from diffusers.pipelines.lumina2.pipeline_lumina2 import Lumina2Pipeline
from safetensors.torch import save_file
from torch import Tensor

from dit.lora.files import read_lora, write_lora
from dit.models.lumina2.diffusers import LUMINA2_NAMES
from dit.models.registry import named_model
from tests.families.lumina2 import random_lumina2
from tests.lora_files import comfyui, linears, merged, random_factors


@torch.no_grad()
def output(network: Any) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    return network(
        hidden_states=torch.randn(1, 4, 6, 4, generator=rng),
        encoder_hidden_states=torch.randn(1, 5, 16, generator=rng),
        timestep=torch.tensor([0.4]),
        encoder_attention_mask=torch.ones(1, 5, dtype=torch.int64),
    ).sample


def test_the_pipeline_loads_our_folder(tmp_path: Path) -> None:
    network = random_lumina2()
    factors = random_factors(linears(network), alphas={"to_q": 2.0})
    write_lora(tmp_path, factors, comfyui_names=LUMINA2_NAMES)
    again = read_lora(tmp_path / "comfyui" / "lora.safetensors", _tiny())
    for name, one in factors.items():
        torch.testing.assert_close(again[name].product(), one.product())
    wanted, network = output(merged(network, factors)), random_lumina2()
    parts: Any = dict.fromkeys(("vae", "text_encoder", "tokenizer", "scheduler"))
    pipe = Lumina2Pipeline(transformer=network, **parts)
    pipe.load_lora_weights(str(tmp_path))
    assert (output(pipe.transformer) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def _tiny() -> Any:
    from dit.config import Precision
    from dit.convert.diffusers_config import model_config

    content = {"_class_name": "Lumina2Transformer2DModel", **random_lumina2().config}
    content = {name: value for name, value in content.items() if name[0] != "_" or "class" in name}
    return model_config(content, precision=Precision.FP32, text_pad_to=None, place="")


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
    assert found.keys() == {
        key.removeprefix("transformer.").partition(".lora_")[0] for key in theirs
    }
    for name, one in found.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(one.down, down)
        torch.testing.assert_close(one.up, up)
