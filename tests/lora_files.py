"""Random adapters, and what they make of tiny networks of Diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dit.lora.factors import LoraFactors
from tests.chroma_pipelines import random_chroma
from tests.flux_networks import random_flux
from tests.hunyuan_image_pipelines import random_hunyuan_image
from tests.hunyuan_pipelines import random_hunyuan
from tests.hunyuan_video_pipelines import random_hunyuan_video
from tests.published import random_model
from tests.qwen_pipelines import random_qwen_image
from tests.sd3_pipelines import random_sd3
from tests.wan_networks import random_wan


def linears(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Module -> (outputs, inputs) of every linear."""
    return {
        name: (one.out_features, one.in_features)
        for name, one in network.named_modules()
        if isinstance(one, nn.Linear)
    }


def random_factors(
    shapes: Mapping[str, tuple[int, int]],
    *,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    seed: int = 0,
) -> dict[str, LoraFactors]:
    """Rank 4 and alpha 8, or what `ranks` and `alphas` say of a module by the end of its name."""
    rng, found = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        r = next((r for end, r in (ranks or {}).items() if name.endswith(end)), 4)
        alpha = next((a for end, a in (alphas or {}).items() if name.endswith(end)), 8.0)
        down = torch.randn(r, inputs, generator=rng) * inputs**-0.5
        up = torch.randn(outputs, r, generator=rng) * (0.5 * r**-0.5)
        found[name] = LoraFactors(down=down, up=up, alpha=alpha)
    return found


def merged(network: nn.Module, factors: Mapping[str, LoraFactors]) -> nn.Module:
    """The network with alpha / r B A added to its weights by hand."""
    with torch.no_grad():
        for name, one in factors.items():
            product = one.up.double() @ one.down.double()
            weight = network.get_parameter(f"{name}.weight")
            weight += (one.alpha / one.down.shape[0] * product).float()
    return network


def kohya(factors: Mapping[str, LoraFactors], names: Mapping[str, str]) -> dict[str, Tensor]:
    """What kohya's scripts write, with alphas; `names` are those of the original project."""
    found = {}
    for module, one in factors.items():
        flat = f"lora_unet_{names[module].replace('.', '_')}"
        found[f"{flat}.lora_down.weight"] = one.down
        found[f"{flat}.lora_up.weight"] = one.up
        found[f"{flat}.alpha"] = torch.tensor(one.alpha)
    return found


def comfyui(
    factors: Mapping[str, LoraFactors],
    names: Mapping[str, str],
    *,
    alphas: bool,
    prefix: str = "diffusion_model.",
) -> dict[str, Tensor]:
    """What ComfyUI and diffusion-pipe write."""
    found = {}
    for module, one in factors.items():
        found[f"{prefix}{names[module]}.lora_A.weight"] = one.down
        found[f"{prefix}{names[module]}.lora_B.weight"] = one.up
        if alphas:
            found[f"{prefix}{names[module]}.alpha"] = torch.tensor(one.alpha)
    return found


class Tiny:
    """A tiny network of one of Diffusers' classes with random weights, and inputs for it."""

    def __init__(self, class_name: str, **changes: Any):
        self.class_name, self.changes = class_name, changes

    def network(self) -> Any:
        builders = {
            "WanTransformer3DModel": random_wan,
            "FluxTransformer2DModel": random_flux,
            "HunyuanVideoTransformer3DModel": random_hunyuan_video,
            "HunyuanVideo15Transformer3DModel": random_hunyuan,
            "HunyuanImageTransformer2DModel": random_hunyuan_image,
            "QwenImageTransformer2DModel": random_qwen_image,
            "SD3Transformer2DModel": random_sd3,
            "ChromaTransformer2DModel": random_chroma,
        }
        return builders.get(self.class_name, random_model)(**self.changes)

    @torch.no_grad()
    def output(self, network: Any) -> Tensor:
        """What it makes of one fixed sample."""
        rng = torch.Generator().manual_seed(5)
        config = network.config
        width = config.text_dim if self.class_name.startswith("Wan") else config.text_embed_dim
        (out,) = network(
            hidden_states=torch.randn(1, config.in_channels, 2, 4, 6, generator=rng),
            timestep=torch.tensor([0.4]),
            encoder_hidden_states=torch.randn(1, 5, width, generator=rng),
            return_dict=False,
        )
        return out


TINY = [Tiny("WanTransformer3DModel"), Tiny("CosmosTransformer3DModel")]
