"""Adapters of HiDream-I1 in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dit.lora.files import read_lora
from dit.models.linears import matrices_of_linears, their_modules
from dit.models.registry import family_named
from tests.families.hidream import random_hidream
from tests.lora_files import comfyui, kohya, linears, random_factors


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
