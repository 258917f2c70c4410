"""Adapters of Ideogram 4 in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import save_file

from dit.lora.files import read_lora
from dit.models.ideogram4.diffusers import IDEOGRAM4_NAMES
from tests.families.ideogram4 import random_ideogram4
from tests.lora_files import check_read_as, comfyui, linears, model_of, random_factors


@pytest.mark.parametrize("tool", ["comfyui", "ai-toolkit", "kohya"])
def test_files_of_other_tools(tool: str, tmp_path: Path) -> None:
    """Queries, keys and values are one linear there; kohya's factors have names with dots."""
    network = random_ideogram4()
    own = {name.replace(".0.", ".*.", 1): shape for name, shape in linears(network).items()}
    of_layers = {n: theirs for n, theirs in IDEOGRAM4_NAMES.items() if n.startswith("layers")}
    shapes = {
        name.replace("*", layer): (len(theirs.split()) * own[theirs.split()[0]][0], inputs)
        for name, theirs in of_layers.items()
        for inputs in [own[theirs.split()[0]][1]]
        for layer in "01"
    }
    told: Any = {"alphas": tool == "kohya"}
    if tool == "ai-toolkit":
        told["prefix"] = "conditional_transformer."
    content = comfyui(random_factors(shapes), {name: name for name in shapes}, **told)
    if tool == "kohya":
        parts = {".lora_A.": ".lora_down.", ".lora_B.": ".lora_up."}
        for part, other in parts.items():
            content = {key.replace(part, other): value for key, value in content.items()}
    read = lora_conversion_utils._convert_non_diffusers_ideogram4_lora_to_diffusers
    theirs = read({key: value.clone() for key, value in content.items()})
    save_file(content, tmp_path / "other.safetensors")
    found = read_lora(tmp_path / "other.safetensors", model_of(network))
    check_read_as(found, theirs)
    assert len(found) == 2 * (4 + 3 + 1)


def test_every_linear_has_a_name_there() -> None:
    """Those beside the layers are called as in Diffusers."""
    named = {one for theirs in IDEOGRAM4_NAMES.values() for one in theirs.split()}
    shapes = linears(random_ideogram4(num_layers=1))
    assert named == {name.replace(".0.", ".*.", 1) for name in shapes}
