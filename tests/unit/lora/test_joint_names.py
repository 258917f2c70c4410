"""Adapters of families with joint attention in the names of the original projects and their tools.

In these several linears of Diffusers are one. Names are written out as the files have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_hunyuan_video_lora_to_diffusers,
    _convert_kohya_flux_lora_to_diffusers,
    _convert_xlabs_flux_lora_to_diffusers,
)
from safetensors.torch import save_file

from dit.lora.factors import LoraFileError
from dit.lora.files import read_lora, write_lora
from dit.lora.names import in_original_names
from dit.models.hunyuan_image import diffusers as image
from dit.models.hunyuan_video import diffusers as first
from dit.models.hunyuan_video_15 import diffusers as second
from dit.models.registry import named_model
from tests.families.hunyuan_image import DISTILLED
from tests.families.table import CASES
from tests.lora_files import check_read_as, comfyui, kohya, linears, random_factors
from tests.tables import table


def shapes_of(family: str, **changes: Any) -> dict[str, Any]:
    """Linear -> (outputs, inputs) of Diffusers' tiny network, without its weights."""
    case = CASES[family]
    with torch.device("meta"):
        return linears(case.network(**{**case.tiny, **changes}))


ONE_LAYER = {"num_layers": 1, "num_single_layers": 1}
VIDEO, VIDEO_15 = shapes_of("hunyuan_video"), shapes_of("hunyuan_video_15")
IMAGE = shapes_of("hunyuan_image", **DISTILLED, **ONE_LAYER)
TABLES = {
    "video, own": (VIDEO, first.HUNYUAN_VIDEO_NAMES),
    "video, comfyui": (VIDEO, first.COMFYUI_NAMES),
    "1.5, own": (VIDEO_15, second.HUNYUAN_NAMES),
    "1.5, comfyui": (VIDEO_15, second.COMFYUI_NAMES),
    "image, own": (IMAGE, image.HUNYUAN_IMAGE_NAMES),
    "image, kohya": (IMAGE, image.KOHYA_NAMES),
    "image, comfyui": (IMAGE, image.COMFYUI_NAMES),
}


@pytest.mark.parametrize("case", TABLES)
def test_names_that_hunyuan_models_have(case: str, tmp_path: Path) -> None:
    """Every linear; of several that are one, their products come back."""
    shapes, table = TABLES[case]
    factors = random_factors(shapes, ranks={"to_q": 3}, alphas={"to_k": 2.0})
    written = in_original_names(factors, table)
    assert written is not None and len(written) < len(factors)
    names = {name: name for name in written}
    (tmp_path / "out").mkdir()
    write_lora(tmp_path / "out", factors, comfyui_names=table)
    save_file(kohya(written, names), tmp_path / "kohya.safetensors")
    for file in (tmp_path / "kohya.safetensors", tmp_path / "out/comfyui/lora.safetensors"):
        read = read_lora(file)
        assert read.keys() == factors.keys()
        for module, one in read.items():
            torch.testing.assert_close(one.product(), factors[module].product())
    of_refiner = "context_embedder.token_refiner.refiner_blocks.0.attn.to_v"
    del factors[of_refiner]  # one with its queries and keys in all of them
    assert in_original_names(factors, table) is None


# Diffusers (scripts/convert_hunyuan_image_to_diffusers.py), the original code, kohya's, ComfyUI's.
HUNYUAN_IMAGE = table(__file__, "hunyuan_image")


def column(text: str, number: int = 0) -> dict[str, list[str]]:
    """Linear of a project -> those of Diffusers; `=` is the name in the column before."""
    found: dict[str, list[str]] = {}
    for line in text.strip().splitlines():
        ours, *theirs = line.split()
        name = next(name for name in theirs[number::-1] if name != "=")
        found.setdefault(name, []).append(ours)
    return found


def assert_reads(
    names: Mapping[str, list[str]], shapes: Mapping[str, Any], folder: Path, model: Any
) -> None:
    """What a project writes of all its linears: products are rows of those of its own.

    `~` marks linears of Diffusers that make (scale, shift), and (shift, scale) in the project.
    """
    plain = {theirs: [one.rstrip("~") for one in ours] for theirs, ours in names.items()}
    assert {one for ours in plain.values() for one in ours} == shapes.keys()
    sizes = {theirs: [shapes[one][0] for one in ours] for theirs, ours in plain.items()}
    fused = {k: (sum(rows), shapes[plain[k][0]][1]) for k, rows in sizes.items()}
    factors, same = random_factors(fused), {name: name for name in fused}
    for tensors in (kohya(factors, same), comfyui(factors, same, alphas=True)):
        save_file(tensors, folder / "x.safetensors")
        read = read_lora(folder, model)
        assert read.keys() == shapes.keys()
        for theirs, one in factors.items():
            parts = one.product().split(sizes[theirs])
            for ours, rows in zip(names[theirs], parts, strict=True):
                wanted = torch.cat(rows.chunk(2)[::-1]) if ours.endswith("~") else rows
                torch.testing.assert_close(read[ours.rstrip("~")].product(), wanted)


@pytest.mark.parametrize("project", ["own", "kohya", "comfyui"])
def test_files_of_hunyuan_image(project: str, tmp_path: Path) -> None:
    names = column(HUNYUAN_IMAGE, ["own", "kohya", "comfyui"].index(project))
    assert_reads(names, IMAGE, tmp_path, named_model("hunyuanimage_21"))


# Diffusers (scripts/convert_sd3_to_diffusers.py), and Stability's code; kohya's scripts have its.
SD3 = table(__file__, "sd3")


def test_files_of_sd3(tmp_path: Path) -> None:
    shapes = shapes_of("sd3", num_layers=2)
    assert_reads(column(SD3), shapes, tmp_path, named_model("sd3.5_medium"))


# Diffusers, and Chroma's code; kohya's scripts, ComfyUI and diffusion-pipe have its.
CHROMA = table(__file__, "chroma")


def test_files_of_chroma(tmp_path: Path) -> None:
    shapes = shapes_of("chroma", **ONE_LAYER, approximator_layers=1)
    assert_reads(column(CHROMA), shapes, tmp_path, named_model("chroma"))


def test_names_of_several_projects_are_those_of_the_network(tmp_path: Path) -> None:
    """`time_in` alone is of any Hunyuan model."""
    one = random_factors({"time_in.in_layer": (8, 4)})
    save_file(comfyui(one, {name: name for name in one}, alphas=True), tmp_path / "x.safetensors")
    for size, told in {
        "hunyuanimage_21": "time_guidance_embed",
        "hunyuanvideo_15": "time_embed",
        "hunyuanvideo": "time_text_embed",
    }.items():
        read = read_lora(tmp_path, named_model(size))
        assert list(read) == [f"{told}.timestep_embedder.linear_1"]


def test_files_of_hunyuan_video_are_read_as_diffusers_reads_them(tmp_path: Path) -> None:
    wide, rng = 3072, torch.Generator().manual_seed(4)  # Diffusers' reader knows no other width
    shapes = {
        "double_blocks.0.img_attn_qkv": (3 * wide, wide),
        "double_blocks.3.txt_attn_qkv": (3 * wide, wide),
        "double_blocks.3.txt_mlp.fc2": (wide, 4 * wide),
        "double_blocks.1.img_mod.linear": (6 * wide, wide),
        "single_blocks.0.linear1": (7 * wide, wide),
        "single_blocks.37.linear2": (wide, 5 * wide),
        "single_blocks.2.modulation.linear": (3 * wide, wide),
        "txt_in.individual_token_refiner.blocks.1.mlp.fc1": (4 * wide, wide),
        "txt_in.individual_token_refiner.blocks.0.self_attn_proj": (wide, wide),
        "txt_in.c_embedder.linear_1": (wide, 4096),
        "guidance_in.mlp.2": (wide, wide),
        "vector_in.in_layer": (wide, 768),
    }
    content = {}
    for module, (outputs, inputs) in shapes.items():
        content[f"transformer.{module}.lora_A.weight"] = torch.randn(2, inputs, generator=rng)
        content[f"transformer.{module}.lora_B.weight"] = torch.randn(outputs, 2, generator=rng)
    save_file(content, tmp_path / "x.safetensors")
    found = read_lora(tmp_path / "x.safetensors")
    theirs = _convert_hunyuan_video_lora_to_diffusers(dict(content))
    names = {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in theirs}
    assert found.keys() == names and len(names) == 19
    for name, one in found.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        for rows in (slice(0, 5), slice(-5, None)):
            torch.testing.assert_close(one.folded().up[rows] @ one.down, up[rows] @ down)


def test_linears_that_flux_has_as_one(tmp_path: Path) -> None:
    """Files of kohya's scripts, against Diffusers' own reading of them."""
    wide, rng = 3072, torch.Generator().manual_seed(4)  # Diffusers' reader knows no other width
    shapes = {
        "double_blocks_0_img_attn_qkv": (3 * wide, wide),
        "double_blocks_3_txt_attn_qkv": (3 * wide, wide),
        "double_blocks_3_txt_mlp_2": (wide, 4 * wide),
        "double_blocks_1_img_mod_lin": (6 * wide, wide),
        "single_blocks_0_linear1": (7 * wide, wide),
        "single_blocks_37_linear2": (wide, 5 * wide),
        "img_in": (wide, 64),
        "txt_in": (wide, 4096),
        "time_in_out_layer": (wide, wide),
        "guidance_in_in_layer": (wide, 256),
        "vector_in_in_layer": (wide, 768),
        "final_layer_linear": (64, wide),
        "final_layer_adaLN_modulation_1": (2 * wide, wide),
    }
    content = {}
    for module, (outputs, inputs) in shapes.items():
        name = f"lora_unet_{module}"
        content[f"{name}.lora_down.weight"] = torch.randn(2, inputs, generator=rng)
        content[f"{name}.lora_up.weight"] = torch.randn(outputs, 2, generator=rng)
        # Diffusers takes no notice of that of the last layer.
        content[f"{name}.alpha"] = torch.tensor(2.0 if "final" in module else 1)
    save_file(content, tmp_path / "kohya.safetensors")
    found = read_lora(tmp_path / "kohya.safetensors")
    theirs = _convert_kohya_flux_lora_to_diffusers(dict(content))
    theirs = {key.removeprefix("transformer."): tensor for key, tensor in theirs.items()}
    names = {key.rpartition(".lora_")[0] for key in theirs}
    assert found.keys() == names and len(names) == 20
    for name, one in found.items():
        down, up = (theirs[f"{name}.lora_{part}.weight"] for part in "AB")
        rows = slice(0, 5)
        torch.testing.assert_close(one.folded().up[rows] @ one.down, up[rows] @ down)
        torch.testing.assert_close(one.folded().up[-5:] @ one.down, up[-5:] @ down)
    key = "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"
    save_file(content | {key: torch.randn(2 * wide, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(LoraFileError, match=r"6144 outputs is too narrow for .*to_q.* together"):
        read_lora(tmp_path / "other.safetensors")


def test_files_of_xlabs(tmp_path: Path) -> None:
    """Of FLUX, against Diffusers' own reading of them."""
    wide, content = 8, {}
    shapes = {
        "double_blocks.0.processor.qkv_lora1": (3 * wide, wide),
        "double_blocks.0.processor.proj_lora1": (wide, wide),
        "double_blocks.11.processor.qkv_lora2": (3 * wide, wide),
        "double_blocks.11.processor.proj_lora2": (wide, wide),
        "single_blocks.2.processor.qkv_lora": (3 * wide, wide),
        "single_blocks.2.processor.proj_lora": (wide, 5 * wide),
    }
    for module, one in random_factors(shapes).items():
        content |= {f"{module}.down.weight": one.down, f"{module}.up.weight": one.up}
    theirs = _convert_xlabs_flux_lora_to_diffusers(dict(content))
    for prefix in ("", "diffusion_model."):
        tensors = {f"{prefix}{name}": tensor for name, tensor in content.items()}
        save_file(tensors, tmp_path / "x.safetensors")
        found = read_lora(tmp_path)
        assert len(found) == 12
        check_read_as(found, theirs)
