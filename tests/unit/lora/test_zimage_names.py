"""Adapters of Z-Image in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_z_image_lora_to_diffusers
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from safetensors.torch import save_file
from torch import Tensor

from dit.lora.files import read_lora, write_lora
from dit.models.zimage.diffusers import ZIMAGE_NAMES
from tests.families.zimage import random_zimage
from tests.lora_files import comfyui, linears, merged, random_factors

STACKS = ("layers", "noise_refiner", "context_refiner")


@torch.no_grad()
def output(network: Any) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    latent, text = torch.randn(4, 1, 6, 4, generator=rng), torch.randn(5, 16, generator=rng)
    return network([latent], torch.tensor([0.4]), [text], return_dict=False)[0][0]


def test_the_pipeline_loads_our_folder(tmp_path: Path) -> None:
    network = random_zimage()
    factors = random_factors(linears(network), alphas={"to_q": 2.0})
    write_lora(tmp_path, factors, comfyui_names=ZIMAGE_NAMES)
    again = read_lora(tmp_path / "comfyui" / "lora.safetensors", _tiny())
    for name, one in factors.items():
        torch.testing.assert_close(again[name].product(), one.product())
    wanted, network = output(merged(network, factors)), random_zimage()
    parts: Any = dict.fromkeys(("vae", "text_encoder", "tokenizer", "scheduler"))
    pipe = ZImagePipeline(transformer=network, **parts)
    pipe.load_lora_weights(str(tmp_path))
    assert (output(pipe.transformer) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def _tiny() -> Any:
    from dit.config import Precision
    from dit.convert.diffusers_config import model_config

    content = {"_class_name": "ZImageTransformer2DModel", **random_zimage().config}
    content = {name: value for name, value in content.items() if name[0] != "_" or "class" in name}
    return model_config(content, precision=Precision.FP32, text_pad_to=None, place="")


def test_files_of_ai_toolkit_diffusion_pipe_and_kohya(tmp_path: Path) -> None:
    """Diffusers' names behind `diffusion_model.`, and with underscores, `out` and alpha."""
    shapes = {n: s for n, s in linears(random_zimage()).items() if n.startswith(STACKS)}
    factors = random_factors(shapes)
    plain: dict[str, Tensor] = {}
    kohya: dict[str, Tensor] = {}
    for name, one in factors.items():
        flat = "lora_unet_" + name.replace("to_out.0", "out").replace(".", "_")
        plain |= {f"diffusion_model.{name}.lora_A.weight": one.down}
        plain |= {f"diffusion_model.{name}.lora_B.weight": one.up}
        kohya |= {f"{flat}.lora_down.weight": one.down, f"{flat}.lora_up.weight": one.up}
        kohya |= {f"{flat}.alpha": torch.tensor(len(one.down) / 2)}
    for content, scale in ((plain, 1.0), (kohya, 0.5)):
        save_file(content, tmp_path / "other.safetensors")
        found = read_lora(tmp_path / "other.safetensors", _tiny())
        theirs = _convert_non_diffusers_z_image_lora_to_diffusers(dict(content))
        assert found.keys() == factors.keys()
        for name, one in found.items():
            down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
            torch.testing.assert_close(one.product(), up @ down)
            torch.testing.assert_close(one.product(), scale * factors[name].up @ factors[name].down)


def test_files_with_one_linear_of_queries_keys_and_values(tmp_path: Path) -> None:
    shapes = {f"{stack}.0.attention.qkv": (144, 48) for stack in STACKS}
    factors = random_factors(shapes)
    save_file(comfyui(factors, {n: n for n in shapes}, alphas=False), tmp_path / "a.safetensors")
    found = read_lora(tmp_path / "a.safetensors", _tiny())
    for name, one in factors.items():
        parts = [name.replace("qkv", f"to_{letter}") for letter in "qkv"]
        whole = torch.cat([found.pop(part).product() for part in parts])
        torch.testing.assert_close(whole, one.up @ one.down)
    assert not found
