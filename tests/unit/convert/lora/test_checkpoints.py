"""Adapters between files and checkpoints: one pack of ours against single samples of Diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel, WanTransformer3DModel
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from dit.batch import LatentSample
from dit.config import RunConfig, Weights
from dit.convert.adapters.export import export_lora
from dit.convert.adapters.import_ import import_lora
from dit.convert.adapters.stored import open_adapters
from dit.convert.cli import main
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights, open_stored
from dit.convert.import_ import import_weights
from dit.convert.lora import LoraFileError, read_lora
from dit.data.pack import PatchLayout, pack_samples
from dit.models.diffusers_names import pairs
from dit.models.family import diffusers_form, family_of
from dit.sampling.unpatchify import unpack_latents
from dit.train.checkpoint.paths import saved_config
from dit.train.checkpoint.state_dict import load_network
from tests.lora_files import Tiny

CLASSES: dict[str, Any] = {
    "WanTransformer3DModel": WanTransformer3DModel,
    "CosmosTransformer3DModel": CosmosTransformer3DModel,
}
# Sizes of which a fused matrix that is cut in the wrong place cannot be right.
CASES = [
    Tiny("WanTransformer3DModel"),
    Tiny("CosmosTransformer3DModel", extra_pos_embed_type="learnable"),
]
LEVELS = (0.3, 0.8)
SIZES = ((1, 4, 6), (3, 2, 4))


def samples(model: Any) -> list[LatentSample]:
    rng = torch.Generator().manual_seed(2)
    return [
        LatentSample(
            key=str(number),
            latent_CFHW=torch.randn(model.in_channels, *size, generator=rng),
            text_LE=torch.randn(5 + number, model.crossattn_emb_size, generator=rng),
            fps=24.0,
        )
        for number, size in enumerate(SIZES)
    ]


@torch.no_grad()
def theirs(network: Any, config: RunConfig) -> list[Tensor]:
    run, model = diffusers_form(config.model).run_network, config.model
    return [run(network, s, level, model) for s, level in zip(samples(model), LEVELS, strict=True)]


@torch.no_grad()
def ours(checkpoint: Path, groups: Any) -> list[Tensor]:
    config = saved_config(checkpoint)
    model = config.model
    network = family_of(model).network()(model, groups).eval()
    load_network(checkpoint, network, groups, averaged=False)
    batch = pack_samples(samples(model), PatchLayout.of(config))
    made_TC = network(batch.latent_TC, torch.tensor(LEVELS), batch)
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    return unpack_latents(made_TC, batch, **patch)


def assert_close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.fixture(params=CASES, ids=lambda tiny: tiny.class_name)
def made(request, groups, tmp_path: Path):
    """A base in both forms, and an adapter that peft made on Diffusers' network."""
    tiny = request.param
    tiny.network().save_pretrained(tmp_path / "hf")
    base = import_weights(tmp_path / "hf", tmp_path / "base").path
    torch.manual_seed(0)
    block = "blocks" if "Wan" in tiny.class_name else "transformer_blocks"
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        # Of q, k and v the first two have an adapter, with two ranks; and some linears outside.
        target_modules=["to_q", "to_k", "to_out.0", "net.2", "proj_out", "linear_1"],
        rank_pattern={"to_q": 3, f"{block}.0.attn2.to_k": 5},
        alpha_pattern={"net.2": 1},
        init_lora_weights=False,
    )
    model = get_peft_model(tiny.network(), config)
    model.save_pretrained(tmp_path / "peft")
    import_lora(tmp_path / "peft", base, tmp_path / "lora")
    return tiny, tmp_path, theirs(model, saved_config(base))


def test_our_network_computes_what_peft_computes(made, groups) -> None:
    tiny, folder, wanted = made
    assert_close(ours(folder / "lora", groups), wanted)
    bare = theirs(tiny.network(), saved_config(folder / "base"))
    assert (bare[0] - wanted[0]).abs().max() > 0.1
    assert_close(ours(folder / "base", groups), bare)


def test_our_folder_computes_it_in_diffusers_and_peft(made) -> None:
    tiny, folder, wanted = made
    config = saved_config(folder / "base")
    done = export_lora(folder / "lora", folder / "out", base_model="Org/Base")
    assert done.modules == len(read_lora(folder / "peft"))
    network = tiny.network()
    network.load_lora_adapter(folder / "out", prefix="transformer", use_safetensors=True)
    assert_close(theirs(network, config), wanted)
    network.fuse_lora()
    assert_close(theirs(network, config), wanted)
    model = PeftModel.from_pretrained(tiny.network(), str(folder / "out"))
    assert_close(theirs(model, config), wanted)
    assert_close(theirs(model.merge_and_unload(), config), wanted)
    card = (folder / "out" / "README.md").read_text()
    assert "Org/Base" in card
    assert "| `lora.rank` | `4` |" in card
    assert (folder / "out" / "comfyui" / "lora.safetensors").is_file()


def test_merged_weights_compute_it_without_an_adapter(made) -> None:
    tiny, folder, wanted = made
    options = ExportOptions(merged=True, scheduler=False)
    export_weights(folder / "lora", folder / "merged", options)
    network = CLASSES[tiny.class_name].from_pretrained(folder / "merged")
    assert_close(theirs(network, saved_config(folder / "base")), wanted)


def test_a_round_trip_keeps_the_factors(made) -> None:
    _, folder, _ = made
    read, opened = read_lora(folder / "peft"), open_adapters(folder / "lora")
    assert opened.weights is Weights.MODEL
    assert opened.factors.keys() == read.keys()
    for name, one in opened.factors.items():
        assert torch.equal(one.down, read[name].down)
        assert torch.equal(one.up, read[name].up)
        assert one.alpha == read[name].alpha


def test_commands(made, capsys) -> None:
    _, folder, _ = made
    place = ["--megatron-path", str(folder / "lora"), "--hf-path"]
    assert main(["export-lora", *place, str(folder / "a")]) == 0
    told = ["--hf-path", str(folder / "a"), "--base-path", str(folder / "base")]
    assert main(["import-lora", *told, "--megatron-path", str(folder / "again")]) == 0
    assert "checkpoint.finetune=true" in capsys.readouterr().out
    assert main(["export", *place, str(folder / "b"), "--merged", "--no-scheduler"]) == 0
    assert main(["export", *place, str(folder / "c")]) == 1
    assert "holds adapters alone" in capsys.readouterr().err
    place[1] = str(folder / "base")
    assert main(["export-lora", *place, str(folder / "c")]) == 1
    assert "no adapters" in capsys.readouterr().err
    told[1] = str(folder / "hf")
    assert main(["import-lora", *told, "--megatron-path", str(folder / "c")]) == 1
    assert "no key of LoRA" in capsys.readouterr().err
    assert not (folder / "c").exists()


def test_adapters_of_another_network_and_no_base(made, tmp_path: Path) -> None:
    tiny, folder, _ = made
    other = next(one for one in CASES if one is not tiny)
    other.network().save_pretrained(folder / "hf2")
    import_weights(folder / "hf2", folder / "base2")
    with pytest.raises(LoraFileError, match="is of another network"):
        import_lora(folder / "peft", folder / "base2", folder / "x")
    with pytest.raises(ConvertError, match="holds no whole weights"):
        import_lora(folder / "peft", folder / "lora", folder / "x")


def test_merging_keeps_the_stored_type_and_what_has_no_adapter(groups, tmp_path: Path) -> None:
    tiny = CASES[0]
    tiny.network().to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    base = import_weights(tmp_path / "hf", tmp_path / "base").path
    name = "blocks.1.attn1.to_k"
    config = LoraConfig(r=2, lora_alpha=1, target_modules=[name], init_lora_weights=False)
    get_peft_model(tiny.network(), config).save_pretrained(tmp_path / "peft")
    import_lora(tmp_path / "peft", base, tmp_path / "lora")
    export_weights(
        tmp_path / "lora", tmp_path / "merged", ExportOptions(merged=True, scheduler=False)
    )
    before = WanTransformer3DModel.from_pretrained(tmp_path / "hf", torch_dtype=torch.bfloat16)
    after = WanTransformer3DModel.from_pretrained(tmp_path / "merged", torch_dtype=torch.bfloat16)
    (one,) = read_lora(tmp_path / "peft").values()
    for key, value in after.state_dict().items():
        old = before.state_dict()[key]
        if key == f"{name}.weight":
            old = (old.float() + one.product()).bfloat16()
        assert torch.equal(value, old), key
    stored, _, _ = open_stored(base, None)
    assert {stored.dtype(pair) for pair in pairs(saved_config(base).model)} == {torch.bfloat16}
