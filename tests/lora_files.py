"""Random adapters, and what they make of tiny networks of Diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dit.config import Precision
from dit.convert.diffusers_config import model_config
from dit.lora.factors import LoraFactors
from tests.families.table import CASES


def linears(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Module -> (outputs, inputs) of every linear."""
    return {
        name: (one.out_features, one.in_features)
        for name, one in network.named_modules()
        if isinstance(one, nn.Linear)
    }


def model_of(network: Any, *, pipeline: str | None = None) -> Any:
    """Our configuration of a network of Diffusers, in float32."""
    content = {"_class_name": type(network).__name__}
    content |= {key: value for key, value in network.config.items() if key[0] != "_"}
    told: Any = {"precision": Precision.FP32, "text_pad_to": None, "pipeline": pipeline}
    return model_config(content, **told, place="")


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


def check_read_as(found: Mapping[str, LoraFactors], theirs: Mapping[str, Tensor]) -> None:
    """Of what we read and Diffusers reads of a file: the same modules with the same products."""
    theirs = {key.removeprefix("transformer."): tensor for key, tensor in theirs.items()}
    assert found.keys() == {key.partition(".lora_")[0] for key in theirs}
    for name, one in found.items():
        down, up = (theirs[f"{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(one.product(), up @ down)


class Tiny:
    """A tiny network of one of Diffusers' classes with random weights, and inputs for it."""

    def __init__(self, class_name: str, **changes: Any):
        self.class_name, self.changes = class_name, changes

    def network(self) -> Any:
        named = {case.network.__name__: case for case in CASES.values()}
        return named[self.class_name].random(**self.changes)

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
