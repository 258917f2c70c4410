"""Files that peft, Diffusers, kohya's scripts and the original projects write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from diffusers.loaders.lora_conversion_utils import (
    _convert_musubi_wan_lora_to_diffusers,
    _convert_non_diffusers_wan_lora_to_diffusers,
)
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from dit.lora.factors import LoraFileError, check_fits, linear_shapes
from dit.lora.files import read_lora
from dit.lora.names import to_original
from dit.models.dit.diffusers import COSMOS1_NAMES, PREDICT2_NAMES
from dit.models.wan.diffusers import WAN_NAMES
from tests.families.wan import TINY as TINY_WAN
from tests.families.wan import wan_model
from tests.lora_files import TINY, Tiny, comfyui, kohya, linears, merged, random_factors

WAN = TINY[0]
BLOCK = {"WanTransformer3DModel": "blocks", "CosmosTransformer3DModel": "transformer_blocks"}


def lora_config(tiny: Tiny, **changes) -> LoraConfig:
    """Patterns as people write them; of the first that fits, as peft has it."""
    block = BLOCK[tiny.class_name]
    wanted = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["to_q", "to_v", "to_out.0", "proj_out"],
        # peft sorts them in saving, and the first that fits decides.
        "rank_pattern": {"attn2.to_q": 3, rf"{block}\.1\.attn1.*to_q": 6, "z|to_q": 5},
        "alpha_pattern": {".*attn2.*": 2, f"^{block}.0.attn1.to_v": 16},
        "init_lora_weights": False,  # random A and B
    }
    return LoraConfig(**(wanted | changes))


@pytest.fixture(params=TINY, ids=lambda tiny: tiny.class_name)
def tiny(request) -> Tiny:
    return request.param


def assert_same_outputs(tiny: Tiny, place: Path, wanted: torch.Tensor) -> None:
    got = tiny.output(merged(tiny.network(), read_lora(place)))
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_keys_of_peft_with_alphas_of_their_own(tmp_path: Path) -> None:
    """Nothing of its configuration is lost."""
    down, up, name = torch.randn(2, 4), torch.randn(4, 2), "base_model.model.blocks.0.attn1.to_q"
    tensors = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    save_file({**tensors, f"{name}.alpha": torch.tensor(4.0)}, tmp_path / "x.safetensors")
    (one,) = read_lora(tmp_path / "x.safetensors").values()
    torch.testing.assert_close(one.product(), 2 * up @ down)


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_saves(tiny: Tiny, rslora: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny.network(), lora_config(tiny, use_rslora=rslora))
    model.save_pretrained(tmp_path)
    wanted = tiny.output(model)
    assert (wanted - tiny.output(tiny.network())).abs().max() > 0.1
    assert_same_outputs(tiny, tmp_path, wanted)
    ranks = {name: one.rank for name, one in read_lora(tmp_path).items()}
    block = BLOCK[tiny.class_name]
    assert ranks[f"{block}.1.attn1.to_q"] == 6
    assert ranks[f"{block}.1.attn2.to_q"] == 3
    assert ranks[f"{block}.0.attn1.to_q"] == 5


def test_what_diffusers_networks_save(tiny: Tiny, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = tiny.network()
    network.add_adapter(lora_config(tiny))
    network.save_lora_adapter(tmp_path)
    assert_same_outputs(tiny, tmp_path, tiny.output(network))


def test_what_diffusers_pipelines_save(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = WAN.network()
    network.add_adapter(lora_config(WAN))
    metadata = network.peft_config["default"].to_dict()
    WanPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(network),
        transformer_lora_adapter_metadata=metadata,
    )
    assert_same_outputs(WAN, tmp_path, WAN.output(network))


IMAGE = Tiny("WanTransformer3DModel", in_channels=12, image_dim=10, added_kv_proj_dim=48)
TABLES = {
    "Wan": (linears(WAN.network()), WAN_NAMES),
    "Wan with image": (linears(IMAGE.network()), WAN_NAMES),
    "Predict2": (linears(TINY[1].network()), PREDICT2_NAMES),
    "Cosmos 1": (linears(TINY[1].network()), COSMOS1_NAMES),
}


@pytest.mark.parametrize("case", TABLES)
def test_names_of_the_original_projects(case: str, tmp_path: Path) -> None:
    """With dots and with underscores, every linear of the network."""
    shapes, table = TABLES[case]
    names = to_original(shapes, table)
    assert names is not None
    factors = random_factors(shapes, ranks={"to_q": 3}, alphas={"to_k": 2.0})
    files = {
        "kohya": kohya(factors, names),
        "comfyui": comfyui(factors, names, alphas=True),
        "plain": comfyui(factors, names, alphas=True, prefix=""),
        "net": comfyui(factors, names, alphas=True, prefix="net."),
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        read = read_lora(tmp_path / f"{name}.safetensors")
        assert read.keys() == factors.keys()
        for module, one in read.items():
            assert one.alpha == factors[module].alpha
            assert torch.equal(one.down, factors[module].down)
            assert torch.equal(one.up, factors[module].up)


@pytest.mark.parametrize("tiny", [WAN, IMAGE], ids=["text", "image"])
def test_files_of_wan_read_as_diffusers_converters_have_them(tiny: Tiny, tmp_path: Path) -> None:
    inner = ("attn1", "attn2", "ffn")
    own = linears(tiny.network()).items()
    shapes = {name: size for name, size in own if any(f".{part}." in name for part in inner)}
    names = to_original(shapes, WAN_NAMES)
    assert names is not None
    factors = random_factors(shapes, ranks={"to_q": 3}, alphas={"to_k": 2.0})
    cases = {
        "kohya": (kohya(factors, names), _convert_musubi_wan_lora_to_diffusers),
        "comfyui": (
            comfyui(factors, names, alphas=True),
            _convert_non_diffusers_wan_lora_to_diffusers,
        ),
    }
    for name, (tensors, convert) in cases.items():
        file = tmp_path / f"{name}.safetensors"
        save_file(tensors, file)
        told = convert({key: tensor.clone() for key, tensor in tensors.items()})
        for module, one in read_lora(file).items():
            down, up = (told[f"transformer.{module}.lora_{part}.weight"] for part in "AB")
            torch.testing.assert_close(one.product(), up @ down)
        assert len(told) == 2 * len(read_lora(file))


def test_what_diffusion_pipe_saves(tmp_path: Path) -> None:
    """peft's configuration, whose patterns are of the original names, and ComfyUI's prefix."""
    shapes, table = TABLES["Predict2"]
    names = to_original(shapes, table)
    assert names is not None
    factors = random_factors(shapes, ranks={"to_q": 6}, alphas={"to_q": 12.0})
    save_file(comfyui(factors, names, alphas=False), tmp_path / "adapter_model.safetensors")
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        rank_pattern={"q_proj": 6},
        alpha_pattern={"q_proj": 12},
        target_modules=sorted(names.values()),
    )
    config.save_pretrained(tmp_path)
    read = read_lora(tmp_path)
    assert {n: one.alpha for n, one in read.items()} == {n: one.alpha for n, one in factors.items()}


def test_types_are_widened_exactly(tmp_path: Path) -> None:
    down = torch.tensor([[1.0 + 2**-7]]).bfloat16()
    save_file({"m.lora_A.weight": down, "m.lora_B.weight": down.half()}, tmp_path / "x.safetensors")
    one = read_lora(tmp_path)["m"]
    assert one.down.dtype == one.up.dtype == torch.float32
    assert float(one.down) == float(one.up) == 1 + 2**-7


def test_adapters_of_another_network_are_named(tmp_path: Path) -> None:
    model = wan_model()
    shapes = linear_shapes(model)
    assert linears(WAN.network()).keys() == shapes.keys()
    check_fits(random_factors(shapes), model, place="x")
    wrong = {**shapes, "blocks.7.attn1.to_q": (48, 48), "blocks.0.attn1.to_v": (48, 40)}
    with pytest.raises(LoraFileError) as error:
        check_fits(random_factors(wrong), model, place="x.safetensors")
    text = str(error.value)
    assert "x.safetensors" in text
    assert "no linear blocks.7.attn1.to_q (the nearest are" in text
    assert "blocks.0.attn1.to_v is of a linear with 40 inputs and 48 outputs" in text


def test_shapes_of_linears_are_those_of_diffusers_network() -> None:
    model = wan_model(mlp_ratio=TINY_WAN["ffn_dim"] / 48)
    assert linear_shapes(model) == linears(WAN.network())


def test_metadata_may_have_no_prefix(tmp_path: Path) -> None:
    one = random_factors({"m": (3, 3)})["m"]
    tensors = {"m.lora_A.weight": one.down, "m.lora_B.weight": one.up}
    for content in ({"r": 4, "lora_alpha": 2}, {"transformer.r": 4, "transformer.lora_alpha": 2}):
        told = {"lora_adapter_metadata": json.dumps(content)}
        save_file(tensors, tmp_path / "x.safetensors", metadata=told)
        assert read_lora(tmp_path)["m"].alpha == 2
