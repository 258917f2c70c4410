"""Folders of Diffusers' Wan: what else they may hold, what is refused, what `verify` compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.config import ObjectiveConfig, RunConfig, Weights
from dit.convert.cli import main
from dit.convert.diffusers_checkpoint import OUR_KEY
from dit.convert.diffusers_config import diffusers_transformer_config
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.load_hf.settings import open_hf_weights
from dit.convert.load_hf.start import HfStart
from dit.models.registry import diffusers_form
from dit.models.wan.family import ImageCondition, WanConfig
from dit.models.wan.model import WanNetwork
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.open_checkpoint import _load
from dit.train.model_and_optimizer import randomise
from tests.families.wan import CONDITIONS, publish_wan, random_wan, wan_model
from tests.resuming import saved_run

IMAGE = {"image_dim": 10, "added_kv_proj_dim": 48}
WEIGHTS = "diffusion_pytorch_model.safetensors"


def _published(folder: Path, kind: str, **changes: Any) -> Path:
    """Diffusers' tiny network of a kind."""
    model = wan_model(kind, text_pad_to=512, **changes)
    content = diffusers_form(model).keys.content(model)
    return publish_wan(folder, random_wan(**content))


def test_a_folder_tells_its_condition(groups, tmp_path: Path) -> None:
    for kind, channels in (("t2v", 4), ("i2v", 4), ("flf2v", 4), ("ti2v", 48)):
        folder = _published(tmp_path / f"{kind}_hf", kind, in_channels=channels)
        model: Any = import_weights(folder, tmp_path / kind).config.model
        wanted = CONDITIONS[kind].get("image_condition", ImageCondition.NONE)
        assert (model.image_condition, model.in_channels) == (wanted, channels)


def test_a_norm_that_nothing_reads_may_be_stored(groups, tmp_path: Path) -> None:
    folder = _published(tmp_path / "hf", "i2v_image")
    tensors = load_file(folder / WEIGHTS)
    tensors |= {f"blocks.{n}.attn2.norm_added_q.weight": torch.ones(48) for n in range(2)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert import_weights(folder, tmp_path / "ours").config.model.name == "custom"
    tensors["blocks.0.attn2.norm_added_v.weight"] = torch.ones(48)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConvertError, match=r"describes, blocks.0.attn2.norm_added_v"):
        import_weights(folder, tmp_path / "others")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"in_channels": 11}, "in_channels=11 must be 4 or 12 for out_channels=4"),
        ({"patch_size": [1, 2, 3]}, r"patch_size=\[1, 2, 3\] must have equal"),
        ({"cross_attn_norm": False}, "cross_attn_norm=false"),
        ({"qk_norm": None}, "qk_norm=None"),
        ({"eps": 1e-5}, "eps=1e-05"),
        ({"image_dim": 10}, "added_kv_proj_dim=None must be 48 .* image_dim=10"),
        ({"pos_embed_seq_len": 6}, "pos_embed_seq_len=6 must be null without image_dim"),
        ({"window_size": [-1, -1]}, "unknown keys window_size"),
    ],
)
def test_what_ours_has_not_is_refused_by_name(tmp_path, changes: dict, words: str) -> None:
    folder = _published(tmp_path / "hf", "t2v")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ConvertError, match=words):
        import_weights(folder, tmp_path / "ours")


def _run(**changes: Any) -> RunConfig:
    return RunConfig(model=wan_model(**changes), objective=ObjectiveConfig(name="flow"))


def test_images_beside_another_number_of_text_rows_are_no_network_of_diffusers() -> None:
    assert diffusers_transformer_config(_run(kind="i2v"))["in_channels"] == 12
    with pytest.raises(ConvertError, match=r"text_pad_to=None cannot be exported, .* with image"):
        diffusers_transformer_config(_run(kind="i2v_image"))


@pytest.mark.parametrize(
    ("kind", "pipeline", "words"),
    [
        ("t2v", "WanPipeline", []),
        ("t2v", "WanImageToVideoPipeline", ["image_condition=none", "passes a picture"]),
        ("i2v", "WanPipeline", ["image_condition=first_frame", "passes no picture"]),
        ("flf2v", "WanImageToVideoPipeline", []),
        *(("ti2v", name, []) for name in ("WanPipeline", "WanImageToVideoPipeline")),
    ],
)
def test_pipelines_fit_what_a_network_is_shown(kind: str, pipeline: str, words: list) -> None:
    for pad_to in (512, None):
        model: WanConfig = wan_model(kind, text_pad_to=pad_to)
        runs = diffusers_form(model).pipelines[pipeline]
        assert runs.samples == "flow"
        found = runs.misfits(model)
        assert len(found) == (pad_to is None) + bool(words)
        assert all(word in found[-1] for word in words)


def test_the_gates_of_sparse_attention_go_by_fastvideos_names(groups, tmp_path, capsys) -> None:
    """They start at zero beside published weights; exports have them, and say who reads them."""
    hf, ours, out = _published(tmp_path / "hf", "t2v"), tmp_path / "ours", tmp_path / "out"
    with pytest.raises(
        ConvertError,
        match=r"^model\.sparse_attention=maybe must be true or false, as in model\.sparse_atten",
    ):
        import_weights(hf, ours, objective=["model.sparse_attention=maybe"])
    told = ("model.sparse_attention=true",)
    imported = import_weights(hf, ours, objective=told)
    assert imported.tensors == len(load_file(hf / WEIGHTS))
    arguments = ["--megatron-path", str(ours), "--hf-path", str(out)]
    assert main(["export", *arguments, "--weights", "model", "--no-scheduler"]) == 0
    said = capsys.readouterr().out
    assert "beyond Diffusers: to_gate_compress" in " ".join(said.split())
    assert "ignores these tensors" in (out / "README.md").read_text()
    tensors = load_file(out / WEIGHTS)
    gates = {f"blocks.{n}.to_gate_compress.{end}" for n in (0, 1) for end in ("weight", "bias")}
    assert tensors.keys() - load_file(hf / WEIGHTS).keys() == gates
    assert not any(tensors[name].any() for name in gates)
    tensors |= {name: torch.randn(tensors[name].shape) for name in gates}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    assert import_weights(out, tmp_path / "again").config.model.sparse_attention
    arguments = ["--megatron-path", str(tmp_path / "again"), "--hf-path", str(out)]
    assert main(["verify", *arguments, "--tensors-only"]) == 0
    assert main(["verify", *arguments]) == 1
    assert "Diffusers cannot compute what this network does" in capsys.readouterr().err
    content = json.loads((out / "config.json").read_text())
    del content[OUR_KEY]
    (out / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConvertError, match=r"to_gate_compress.* set model.sparse_attention=true"):
        import_weights(out, tmp_path / "others")
    told = ("model.sparse_attention=true", "model.sparse_share=0.20")
    assert import_weights(out, tmp_path / "others", objective=told).config.model.sparse_share == 0.2
    del tensors["blocks.1.to_gate_compress.bias"]
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConvertError, match=r"has no blocks.1.to_gate_compress.bias"):
        import_weights(out, tmp_path / "third", objective=told)


def test_a_run_from_weights_without_gates_starts_them_at_zero(groups, tmp_path) -> None:
    hf, model = _published(tmp_path / "hf", "t2v"), wan_model(text_pad_to=512)
    model = replace(model, sparse_attention=True)
    network = WanNetwork(model, groups)
    randomise(network, seed=3)
    start = HfStart(open_hf_weights(hf, model))
    start.fill(network)
    values = {name: bool(weight.any()) for name, weight in network.named_parameters()}
    assert {name for name, there in values.items() if not there} == {
        f"blocks.layers.{n}.self_attention.linear_gate.{end}"
        for n in (0, 1)
        for end in ("weight", "bias")
    }
    assert any("they start at zero: blocks.0.to_gate_compress.bias" in one for one in start.notes)


def _share(place: Path, config: RunConfig) -> float:
    loaded = _load(place, config, averaged=False, lora=(), options=LoadOptions())
    (network,) = (one for one in loaded.modules() if isinstance(one, WanNetwork))
    return float(network.sparse_share)


def test_a_checkpoint_attends_as_at_its_step(groups, tmp_path) -> None:
    """Whatever its folder is called; an export says that share, and an import has it for good."""
    shares = {"sparse_share": 0.2, "sparse_share_step": 0.25, "sparse_share_interval": 1}
    model = wan_model(sparse_attention=True, text_pad_to=16, **shares)
    config = RunConfig(model=model, objective=ObjectiveConfig(name="flow"))
    run = saved_run(tmp_path / "run", config, groups)
    assert _share(run, config) == 0.5  # after two steps
    kept = run.rename(tmp_path / "best")
    assert _share(kept, config) == 0.5
    export_weights(kept, tmp_path / "hf", ExportOptions(weights=Weights.MODEL))
    assert "VSA_sparsity=0.5" in (tmp_path / "hf/README.md").read_text()
    done = import_weights(tmp_path / "hf", tmp_path / "ours")
    assert _share(done.path, done.config) == 0.5
