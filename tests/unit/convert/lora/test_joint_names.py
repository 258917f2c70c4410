"""Adapters of families with joint attention in the names of the original projects and their tools.

In these several linears of Diffusers are one. Names are written out as the files have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
)
from diffusers.loaders.lora_conversion_utils import (
    _convert_hunyuan_video_lora_to_diffusers,
    _convert_kohya_flux_lora_to_diffusers,
)
from safetensors.torch import save_file

from dit.convert.lora import LoraFactors, LoraFileError, read_lora, write_lora
from dit.convert.lora.original_names import in_original_names
from dit.models.family import named_model
from dit.models.hunyuan_image import original_names as image
from dit.models.hunyuan_video import original_names as first
from dit.models.hunyuan_video_15 import original_names as second
from tests import hunyuan_image_pipelines, hunyuan_pipelines, hunyuan_video_pipelines
from tests.hunyuan_image_pipelines import DISTILLED
from tests.lora_files import comfyui, kohya, linears, random_factors


def shapes_of(network: type, config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Linear -> (outputs, inputs) of one of Diffusers' networks, without its weights."""
    with torch.device("meta"):
        return linears(network(**config | changes))


ONE_LAYER = {"num_layers": 1, "num_single_layers": 1}
VIDEO = shapes_of(HunyuanVideoTransformer3DModel, hunyuan_video_pipelines.TINY)
VIDEO_15 = shapes_of(HunyuanVideo15Transformer3DModel, hunyuan_pipelines.TINY)
IMAGE = shapes_of(
    HunyuanImageTransformer2DModel, hunyuan_image_pipelines.TINY, **DISTILLED, **ONE_LAYER
)
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
    """Every linear but that of the last norm; of several that are one, their products come back."""
    shapes, table = TABLES[case]
    shapes = {name: size for name, size in shapes.items() if name != "norm_out.linear"}
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
HUNYUAN_IMAGE = """
transformer_blocks.0.norm1.linear            double_blocks.0.img_mod.linear  =  double_blocks.0.img_mod.lin
transformer_blocks.0.attn.to_q               double_blocks.0.img_attn_q  double_blocks.0.img_attn_qkv  double_blocks.0.img_attn.qkv
transformer_blocks.0.attn.to_k               double_blocks.0.img_attn_k  double_blocks.0.img_attn_qkv  double_blocks.0.img_attn.qkv
transformer_blocks.0.attn.to_v               double_blocks.0.img_attn_v  double_blocks.0.img_attn_qkv  double_blocks.0.img_attn.qkv
transformer_blocks.0.attn.to_out.0           double_blocks.0.img_attn_proj  =  double_blocks.0.img_attn.proj
transformer_blocks.0.ff.net.0.proj           double_blocks.0.img_mlp.fc1  =  double_blocks.0.img_mlp.0
transformer_blocks.0.ff.net.2                double_blocks.0.img_mlp.fc2  =  double_blocks.0.img_mlp.2
transformer_blocks.0.norm1_context.linear    double_blocks.0.txt_mod.linear  =  double_blocks.0.txt_mod.lin
transformer_blocks.0.attn.add_q_proj         double_blocks.0.txt_attn_q  double_blocks.0.txt_attn_qkv  double_blocks.0.txt_attn.qkv
transformer_blocks.0.attn.add_k_proj         double_blocks.0.txt_attn_k  double_blocks.0.txt_attn_qkv  double_blocks.0.txt_attn.qkv
transformer_blocks.0.attn.add_v_proj         double_blocks.0.txt_attn_v  double_blocks.0.txt_attn_qkv  double_blocks.0.txt_attn.qkv
transformer_blocks.0.attn.to_add_out         double_blocks.0.txt_attn_proj  =  double_blocks.0.txt_attn.proj
transformer_blocks.0.ff_context.net.0.proj   double_blocks.0.txt_mlp.fc1  =  double_blocks.0.txt_mlp.0
transformer_blocks.0.ff_context.net.2        double_blocks.0.txt_mlp.fc2  =  double_blocks.0.txt_mlp.2
single_transformer_blocks.0.norm.linear      single_blocks.0.modulation.linear  =  single_blocks.0.modulation.lin
single_transformer_blocks.0.attn.to_q        single_blocks.0.linear1_q  single_blocks.0.linear1  =
single_transformer_blocks.0.attn.to_k        single_blocks.0.linear1_k  single_blocks.0.linear1  =
single_transformer_blocks.0.attn.to_v        single_blocks.0.linear1_v  single_blocks.0.linear1  =
single_transformer_blocks.0.proj_mlp         single_blocks.0.linear1_mlp  single_blocks.0.linear1  =
single_transformer_blocks.0.proj_out         single_blocks.0.linear2.fc  single_blocks.0.linear2  =
time_guidance_embed.timestep_embedder.linear_1    time_in.mlp.0      =  time_in.in_layer
time_guidance_embed.timestep_embedder.linear_2    time_in.mlp.2      =  time_in.out_layer
time_guidance_embed.timestep_embedder_r.linear_1  time_r_in.mlp.0    =  time_r_in.in_layer
time_guidance_embed.timestep_embedder_r.linear_2  time_r_in.mlp.2    =  time_r_in.out_layer
time_guidance_embed.guidance_embedder.linear_1    guidance_in.mlp.0  =  guidance_in.in_layer
time_guidance_embed.guidance_embedder.linear_2    guidance_in.mlp.2  =  guidance_in.out_layer
context_embedder_2.linear_1  byt5_in.fc1  =  =
context_embedder_2.linear_2  byt5_in.fc2  =  =
context_embedder_2.linear_3  byt5_in.fc3  =  =
context_embedder.proj_in     txt_in.input_embedder  =  =
context_embedder.time_text_embed.timestep_embedder.linear_1  txt_in.t_embedder.mlp.0  =  txt_in.t_embedder.in_layer
context_embedder.time_text_embed.timestep_embedder.linear_2  txt_in.t_embedder.mlp.2  =  txt_in.t_embedder.out_layer
context_embedder.time_text_embed.text_embedder.linear_1  txt_in.c_embedder.linear_1  =  txt_in.c_embedder.in_layer
context_embedder.time_text_embed.text_embedder.linear_2  txt_in.c_embedder.linear_2  =  txt_in.c_embedder.out_layer
context_embedder.token_refiner.refiner_blocks.0.attn.to_q      txt_in.individual_token_refiner.blocks.0.self_attn_qkv  =  txt_in.individual_token_refiner.blocks.0.self_attn.qkv
context_embedder.token_refiner.refiner_blocks.0.attn.to_k      txt_in.individual_token_refiner.blocks.0.self_attn_qkv  =  txt_in.individual_token_refiner.blocks.0.self_attn.qkv
context_embedder.token_refiner.refiner_blocks.0.attn.to_v      txt_in.individual_token_refiner.blocks.0.self_attn_qkv  =  txt_in.individual_token_refiner.blocks.0.self_attn.qkv
context_embedder.token_refiner.refiner_blocks.0.attn.to_out.0  txt_in.individual_token_refiner.blocks.0.self_attn_proj  =  txt_in.individual_token_refiner.blocks.0.self_attn.proj
context_embedder.token_refiner.refiner_blocks.0.ff.net.0.proj  txt_in.individual_token_refiner.blocks.0.mlp.fc1  =  txt_in.individual_token_refiner.blocks.0.mlp.0
context_embedder.token_refiner.refiner_blocks.0.ff.net.2       txt_in.individual_token_refiner.blocks.0.mlp.fc2  =  txt_in.individual_token_refiner.blocks.0.mlp.2
context_embedder.token_refiner.refiner_blocks.0.norm_out.linear  txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1  =  =
proj_out  final_layer.linear  =  =
"""  # noqa: E501


def column(text: str, number: int) -> dict[str, list[str]]:
    """Linear of a project -> those of Diffusers; `=` is the name in the column before."""
    found: dict[str, list[str]] = {}
    for line in text.strip().splitlines():
        ours, *theirs = line.split()
        name = next(name for name in theirs[number::-1] if name != "=")
        found.setdefault(name, []).append(ours)
    return found


def file_of(names: Mapping[str, list[str]], shapes: Mapping[str, Any], *, flat: bool) -> dict:
    """What a project writes of random adapters of all its linears."""
    fused = {
        theirs: (sum(shapes[one][0] for one in ours), shapes[ours[0]][1])
        for theirs, ours in names.items()
    }
    own = {name: name for name in fused}
    write = kohya if flat else partial(comfyui, alphas=True)
    return write(random_factors(fused), own)


def assert_reads(
    read: Mapping[str, LoraFactors], names: Mapping[str, list[str]], shapes: Mapping[str, Any]
) -> None:
    """The products are rows of those of `file_of`."""
    assert read.keys() == {one for ours in names.values() for one in ours}
    fused = {
        theirs: (sum(shapes[one][0] for one in ours), shapes[ours[0]][1])
        for theirs, ours in names.items()
    }
    for theirs, one in random_factors(fused).items():
        rows = one.product().split([shapes[ours][0] for ours in names[theirs]])
        for ours, wanted in zip(names[theirs], rows, strict=True):
            torch.testing.assert_close(read[ours].product(), wanted)


@pytest.mark.parametrize("project", ["own", "kohya", "comfyui"])
def test_files_of_hunyuan_image(project: str, tmp_path: Path) -> None:
    names = column(HUNYUAN_IMAGE, ["own", "kohya", "comfyui"].index(project))
    assert {one for ours in names.values() for one in ours} == IMAGE.keys() - {"norm_out.linear"}
    for flat in (True, False):
        save_file(file_of(names, IMAGE, flat=flat), tmp_path / "x.safetensors")
        assert_reads(read_lora(tmp_path, named_model("hunyuanimage_21")), names, IMAGE)


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
    }
    content = {}
    for module, (outputs, inputs) in shapes.items():
        name = f"lora_unet_{module}"
        content[f"{name}.lora_down.weight"] = torch.randn(2, inputs, generator=rng)
        content[f"{name}.lora_up.weight"] = torch.randn(outputs, 2, generator=rng)
        content[f"{name}.alpha"] = torch.tensor(1.0)
    save_file(content, tmp_path / "kohya.safetensors")
    found = read_lora(tmp_path / "kohya.safetensors")
    theirs = _convert_kohya_flux_lora_to_diffusers(dict(content))
    names = {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in theirs}
    assert found.keys() == names and len(names) == 13
    for name, one in found.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        rows = slice(0, 5)
        torch.testing.assert_close(one.folded().up[rows] @ one.down, up[rows] @ down)
        torch.testing.assert_close(one.folded().up[-5:] @ one.down, up[-5:] @ down)
    key = "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"
    save_file(content | {key: torch.randn(2 * wide, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(LoraFileError, match=r"6144 outputs is none of .*to_q.* together"):
        read_lora(tmp_path / "other.safetensors")
