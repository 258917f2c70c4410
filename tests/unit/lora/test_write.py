"""Our folder of adapters in Diffusers and in peft: the outputs of the weights merged by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_anima_lora_to_diffusers,
    _convert_non_diffusers_wan_lora_to_diffusers,
)
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit.convert.cards import LoraCard, RunFacts, ShownPicture
from dit.convert.lora import write_folder
from dit.lora.factors import LoraFactors
from dit.lora.files import read_lora, write_lora
from dit.models.dit.diffusers import COSMOS1_NAMES, PREDICT2_NAMES
from dit.models.wan.diffusers import WAN_NAMES
from tests.lora_files import TINY, Tiny, linears, merged, random_factors

DIFFUSERS, PEFT = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
COMFYUI = "comfyui/lora.safetensors"
CASES = {
    "all linears": ("", {}, {}),
    "attention, one rank": ("attn", {}, {}),
    # q has more rank than k and v, and the feed-forward another alpha.
    "ranks and alphas": ("", {"to_q": 7, "proj_out": 3}, {"net.2": 1.5, "attn1.to_q": 0.5}),
}
NAMES = {"WanTransformer3DModel": WAN_NAMES, "CosmosTransformer3DModel": PREDICT2_NAMES}


def factors_of(tiny: Tiny, case: str) -> dict[str, LoraFactors]:
    part, ranks, alphas = CASES[case]
    shapes = {name: size for name, size in linears(tiny.network()).items() if part in name}
    return random_factors(shapes, ranks=ranks, alphas=alphas)


@pytest.fixture(
    params=[(tiny, case) for tiny in TINY for case in CASES],
    ids=lambda one: f"{one[0].class_name}, {one[1]}",
)
def written(request, tmp_path: Path):
    tiny, case = request.param
    factors = factors_of(tiny, case)
    write_lora(tmp_path, factors, comfyui_names=NAMES[tiny.class_name])
    return tiny, factors, tmp_path, tiny.output(merged(tiny.network(), factors))


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_diffusers_gives_them_without_metadata_too(written, tmp_path: Path) -> None:
    tiny, _, folder, wanted = written
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(folder / DIFFUSERS), bare)
    network = tiny.network()
    network.load_lora_adapter(bare, prefix="transformer", use_safetensors=True)
    assert_equal(tiny.output(network), wanted)


def test_every_file_of_the_folder_reads_as_the_same_adapter(written) -> None:
    tiny, factors, folder, wanted = written
    for place in (folder, folder / DIFFUSERS, folder / PEFT, folder / COMFYUI):
        read = read_lora(place)
        assert list(read) == list(read_lora(folder))
        assert read.keys() == factors.keys()
        assert_equal(tiny.output(merged(tiny.network(), read)), wanted)
        for name, one in read.items():
            assert one.alpha == one.rank
            torch.testing.assert_close(one.product(), factors[name].product())


def test_diffusers_converters_read_the_file_for_comfyui(written, tmp_path: Path) -> None:
    tiny, _, folder, wanted = written
    stored = load_file(folder / COMFYUI)
    assert all(key.startswith("diffusion_model.") for key in stored)
    convert = {
        "WanTransformer3DModel": _convert_non_diffusers_wan_lora_to_diffusers,
        "CosmosTransformer3DModel": _convert_non_diffusers_anima_lora_to_diffusers,
    }[tiny.class_name]
    network = tiny.network()
    network.load_lora_adapter(convert(stored), prefix="transformer")
    assert_equal(tiny.output(network), wanted)


@pytest.mark.parametrize("table", [WAN_NAMES, PREDICT2_NAMES, COSMOS1_NAMES])
def test_names_of_original_projects_are_one_to_one(table: dict[str, str]) -> None:
    assert len(set(table.values())) == len(table)
    assert all(a.count("*") == b.count("*") <= 1 for a, b in table.items())


def test_file_for_comfyui_needs_a_name_for_each_module(tmp_path: Path) -> None:
    factors = random_factors({"blocks.0.attn1.to_q": (4, 4), "blocks.0.attn9.to_q": (4, 4)})
    files = write_lora(tmp_path, factors, comfyui_names=WAN_NAMES)
    assert [file.name for file in files] == [DIFFUSERS, PEFT]
    write_folder(tmp_path, factors, LoraCard(network="N"), comfyui_names=WAN_NAMES)
    assert "ComfyUI" not in (tmp_path / "README.md").read_text()


def test_configuration_is_one_that_peft_writes(tmp_path: Path) -> None:
    factors = random_factors({"a.x": (4, 4), "a.y": (4, 4), "b.x": (4, 4)}, ranks={"b.x": 2})
    write_lora(tmp_path, factors, base="Org/Base")
    config = LoraConfig.from_pretrained(str(tmp_path))
    assert config.base_model_name_or_path == "Org/Base"
    assert (config.r, config.lora_alpha) == (4, 4)
    assert config.target_modules == {"a.x", "a.y", "b.x"}
    assert list(config.rank_pattern.values()) == list(config.alpha_pattern.values()) == [2]
    with safe_open(tmp_path / DIFFUSERS, framework="pt") as file:
        told = json.loads(file.metadata()["lora_adapter_metadata"])
    assert told == {f"transformer.{k}": v for k, v in config_json(tmp_path).items()}


def config_json(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def test_types_and_factors_that_share_memory(tmp_path: Path) -> None:
    down = torch.ones(2, 4)
    one = LoraFactors(down=down, up=torch.ones(4, 2), alpha=1.0)
    both = {"a.x": one, "a.y": LoraFactors(down=down, up=one.up, alpha=4.0)}
    write_lora(tmp_path, both, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / PEFT).values()} == {torch.bfloat16}
    read = read_lora(tmp_path)
    assert {name: float(part.up[0, 0]) for name, part in read.items()} == {"a.x": 0.5, "a.y": 2.0}


def test_card_says_what_is_known_and_shows_the_samples(tmp_path: Path) -> None:
    picture = tmp_path / "step_10.png"
    picture.write_bytes(b"png")
    card = LoraCard(
        network="WanTransformer3DModel",
        base="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        code="from diffusers import WanPipeline",
        run=RunFacts(
            data="20 clips",
            licence="CC-BY-4.0",
            steps=2000,
            settings={"lora.rank": "32"},
            pictures=(ShownPicture(file=picture, prompt="a fox"),),
        ),
    )
    folder = tmp_path / "out"
    folder.mkdir()
    factors = random_factors({"blocks.0.attn1.to_q": (4, 4)})
    write_folder(folder, factors, card, comfyui_names=WAN_NAMES)
    text = (folder / "README.md").read_text()
    for part in (
        'base_model: "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"',
        "- Steps: 2,000",
        "- Data: 20 clips",
        "- Licence of the data: CC-BY-4.0",
        "| `lora.rank` | `32` |",
        "from diffusers import WanPipeline",
        "| ![](samples/step_10.png) |\n| --- |\n| a fox |\n",
        "comfyui/lora.safetensors",
    ):
        assert part in text
    assert (folder / "samples" / "step_10.png").read_bytes() == b"png"
    bare = LoraCard(network="N").text(comfyui=False)
    assert not any(
        word in bare for word in ("Data", "Licence", "Steps", "Samples", "Settings", "None")
    )
