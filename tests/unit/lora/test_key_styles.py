"""Every way in which tools write the keys of an adapter, for every linear of every network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dit.lora.factors import LoraFactors, LoraFileError, linear_shapes
from dit.lora.files import read_lora
from dit.models.registry import families
from tests.lora_files import random_factors
from tests.tables import table

Style = Callable[[str], tuple[str, str, str | None]]
"""Diffusers' name of a module -> keys of A, B and, if the style has one, alpha."""


def dotted(prefix: str, down: str, up: str, alpha: str | None = None) -> Style:
    def keys(module: str) -> tuple[str, str, str | None]:
        name = f"{prefix}{module}"
        return f"{name}.{down}", f"{name}.{up}", alpha and f"{name}.{alpha}"

    return keys


def flat(prefix: str) -> Style:
    """Of kohya's scripts and LyCORIS: underscores for dots."""

    def keys(module: str) -> tuple[str, str, str | None]:
        name = prefix + module.replace(".", "_")
        return f"{name}.lora_down.weight", f"{name}.lora_up.weight", f"{name}.alpha"

    return keys


PEFT = ("lora_A.weight", "lora_B.weight")
STYLES: dict[str, Style] = {
    "diffusers": dotted("transformer.", *PEFT),
    "network alphas": dotted("transformer.", *PEFT, "alpha"),
    "no prefix": dotted("", *PEFT),
    "factors without weight": dotted("", "lora_A", "lora_B"),
    "factors without weight, prefix": dotted("transformer.", "lora_A", "lora_B", "alpha"),
    "diffusion_model": dotted("diffusion_model.", *PEFT, "alpha"),
    "model.diffusion_model": dotted("model.diffusion_model.", *PEFT),
    "state dict of peft": dotted("", "lora_A.default.weight", "lora_B.default.weight"),
    "down and up": dotted("", "lora_down.weight", "lora_up.weight", "alpha"),
    "lora.down": dotted("", "lora.down.weight", "lora.up.weight", "lora.alpha"),
    "linear layer": dotted(
        "transformer.", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight"
    ),
    "kohya": flat("lora_unet_"),
    "VideoX-Fun": flat("lora_unet__"),
    "OneTrainer": flat("lora_transformer_"),
    "LyCORIS": flat("lycoris_"),
}


def tiny_networks() -> dict[str, Any]:
    """Every kind of network of every family that Diffusers has."""
    return {
        size: family.config(name=size, **{**family.sizes[size], **keys})
        for family in families()
        if family.diffusers is not None
        for size, keys in family.tiny.items()
    }


MODELS = tiny_networks()


def written(factors: Mapping[str, LoraFactors], style: Style) -> dict[str, Tensor]:
    found = {}
    for module, one in factors.items():
        down, up, alpha = style(module)
        found |= {down: one.down, up: one.up}
        if alpha is not None:
            found[alpha] = torch.tensor(one.alpha)
    return found


def every_kind(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """One linear of each name, whatever the number of its block."""
    last = {re.sub(r"\d+", "*", name): name for name in shapes}
    return {name: shapes[name] for name in last.values()}


@pytest.mark.parametrize("size", MODELS)
def test_every_linear_in_every_style(size: str, tmp_path: Path) -> None:
    shapes = every_kind(linear_shapes(MODELS[size]))
    factors = random_factors(shapes, ranks={"to_q": 3}, alphas={"to_k": 2.0})
    for name, style in STYLES.items():
        save_file(written(factors, style), tmp_path / "x.safetensors")
        has_alpha = style("m")[2] is not None
        read = read_lora(tmp_path, MODELS[size])
        assert read.keys() == factors.keys(), name
        for module, one in read.items():
            assert torch.equal(one.down, factors[module].down)
            assert torch.equal(one.up, factors[module].up)
            assert one.alpha == (factors[module].alpha if has_alpha else one.rank), name


def test_former_processors_of_diffusers(tmp_path: Path) -> None:
    down, up = torch.ones(2, 3), torch.ones(4, 2)
    tensors = {}
    for linear in ("to_q", "to_out", "add_k_proj"):
        name = f"transformer.transformer_blocks.0.attn.processor.{linear}_lora"
        tensors |= {f"{name}.down.weight": down.clone(), f"{name}.up.weight": up.clone()}
    save_file(tensors, tmp_path / "x.safetensors")
    ends = {name.removeprefix("transformer_blocks.0.attn.") for name in read_lora(tmp_path)}
    assert ends == {"to_q", "to_out.0", "add_k_proj"}


OF_TEXT = table(__file__, "of_text")


def test_keys_of_text_encoders_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    factors = random_factors({"blocks.0.attn1.to_q": (6, 5)})
    ours = written(factors, STYLES["diffusers"])
    file = tmp_path / "x.safetensors"
    save_file(ours | {name: torch.ones(2) for name in OF_TEXT}, file)
    with pytest.raises(LoraFileError, match="--ignore_text_encoder"):
        read_lora(file)
    odd = {name: torch.full((2,), float("nan")) for name in OF_TEXT}  # not even looked at
    save_file(ours | odd, file)
    said: list[str] = []
    assert read_lora(file, without_text_encoder=said.append).keys() == factors.keys()
    (line,) = said
    assert f"{len(OF_TEXT)} of {len(OF_TEXT) + 2} keys" in line and str(file) in line
    save_file(ours, file)
    assert read_lora(file, without_text_encoder=said.append).keys() == factors.keys()
    assert said == [line]  # nothing is said of a file without any
    save_file(odd, file)
    with pytest.raises(LoraFileError, match=f"only {len(OF_TEXT)} keys of text encoders"):
        read_lora(file, without_text_encoder=said.append)


@pytest.mark.parametrize("key", OF_TEXT)
def test_each_key_of_a_text_encoder_is_refused_as_one(key: str, tmp_path: Path) -> None:
    save_file({key: torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(LoraFileError, match="belongs to a text encoder"):
        read_lora(tmp_path)


@pytest.mark.parametrize("alpha", [0.0, -4.0])
def test_an_alpha_of_zero_or_below_is_refused(alpha: float, tmp_path: Path) -> None:
    one = random_factors({"m.n": (6, 5)}, alphas={"m.n": alpha})
    save_file(written(one, STYLES["network alphas"]), tmp_path / "x.safetensors")
    with pytest.raises(LoraFileError, match=rf"transformer\.m\.n\.alpha: alpha is {alpha:g}"):
        read_lora(tmp_path)
    for told in ({"lora_alpha": alpha}, {"lora_alpha": 4, "alpha_pattern": {"m.n": alpha}}):
        content = {"lora_adapter_metadata": json.dumps({"r": 4, **told})}
        tensors = written(one, STYLES["diffusers"])
        save_file(tensors, tmp_path / "x.safetensors", metadata=content)
        with pytest.raises(LoraFileError, match=rf"of m\.n: alpha is {alpha:g}"):
            read_lora(tmp_path)
