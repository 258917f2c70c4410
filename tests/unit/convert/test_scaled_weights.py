"""Weights in 8-bit floats with scales become bfloat16, bit for bit; 4-bit ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dit.config import Precision, Weights
from dit.convert.diffusers_checkpoint import INDEX, WEIGHTS, open_folder
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.load_hf.settings import open_hf_weights
from dit.convert.verify import compare_forward, compare_tensors
from tests.families import ideogram4
from tests.families.ideogram4 import random_ideogram4

FUSED = "attention.qkv.weight"


def _eight_bits(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a published folder stores of a network saved in `folder`, and what it means."""
    stored, meant = {}, {}
    for name, weight in load_file(folder / f"{WEIGHTS}.safetensors").items():
        if weight.dim() < 2 or "embed" in name:
            stored[name] = meant[name] = weight.bfloat16()
            continue
        scale_O = weight.abs().amax(1) / 448
        scale_O = scale_O.bfloat16().float() if "w1" in name else scale_O
        values = (weight / scale_O[:, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale"] = values, scale_O
        meant[name] = (values.float() * scale_O[:, None]).bfloat16()
    for layer in (f"layers.{n}.attention." for n in range(2)):
        for kind in ("weight", "weight_scale"):
            parts = [stored.pop(f"{layer}to_{letter}.{kind}") for letter in "qkv"]
            whole = torch.cat([part.view(torch.uint8) for part in parts])
            stored[f"{layer}qkv.{kind}"] = whole.view(parts[0].dtype)
            stored[f"{layer}o.{kind}"] = stored.pop(f"{layer}to_out.0.{kind}")
    stored["layers.0.feed_forward.w2.weight_scale"] = torch.tensor(0.5)  # one for all rows
    second = "layers.0.feed_forward.w2.weight"
    meant[second] = (stored[second].float() * 0.5).bfloat16()
    return stored, meant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "hf"
    random_ideogram4().save_pretrained(place)
    return place


def _store(folder: Path, stored: dict[str, Tensor]) -> None:
    """In two files, with scales away from their weights."""
    (folder / f"{WEIGHTS}.safetensors").unlink(missing_ok=True)
    files = [f"{WEIGHTS}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    told = {name: files[name.endswith("_scale")] for name in stored}
    for file in files:
        save_file({n: x for n, x in stored.items() if told[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": told}))


def test_eight_bits_are_multiplied_out_once(groups, folder: Path, tmp_path: Path) -> None:
    """Import, export, verify; adapters that start from the folder; a config.json that says it."""
    stored, meant = _eight_bits(folder)
    _store(folder, stored)
    config = json.loads((folder / "config.json").read_text())
    told = config | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(told))
    done = import_weights(folder, tmp_path / "ours")
    assert done.config.model.precision is Precision.BF16 and done.tensors == len(meant)
    (notice,) = done.notices
    scaled = [name for name, value in meant.items() if value.dim() > 1 and "embed" not in name]
    assert f"{folder} has {len(scaled)} weights in 8-bit floats" in notice
    export_weights(done.path, tmp_path / "back", ExportOptions(scheduler=False))
    back = load_file(tmp_path / "back" / f"{WEIGHTS}.safetensors")
    assert back.keys() == meant.keys()
    assert all(torch.equal(back[name], value) for name, value in meant.items())
    tensors, _ = compare_tensors(folder, done.path, Weights.MODEL)
    forward = compare_forward(folder, done.path, Weights.MODEL)
    assert (tensors.different, tensors.count) == (0, len(meant))
    assert forward.largest <= 1e-4 * forward.scale
    started = open_hf_weights(folder, done.config.model)
    assert started.notes == [notice]
    source, (rows, columns) = started.source, (slice(3, 9), slice(1, None))
    for name, value in meant.items():
        part = (rows, columns)[: value.dim()]
        assert torch.equal(source.read(name, part), value[part])


def test_a_pipeline_with_scales_is_not_exported(groups, tmp_path: Path) -> None:
    """Diffusers would read them without: the second network's, or those of the text encoder."""
    ideogram4.pipeline(tmp_path)
    source = tmp_path / "pipeline"
    done = import_weights(source, tmp_path / "ours")
    for part in ("unconditional_transformer", "text_encoder"):
        (file,) = (source / part).glob("*.safetensors")
        plain = load_file(file)
        name = next(name for name, weight in plain.items() if weight.dim() == 2)
        scaled = {name: plain[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
        save_file(plain | scaled, file)
        with pytest.raises(ConvertError, match=rf"scales in {part}, which Diffusers does not"):
            export_weights(done.path, tmp_path / "out", ExportOptions(pipeline_from=source))
        save_file(plain, file)
    assert not (tmp_path / "out").exists()


def test_weights_without_their_scales_are_refused(folder: Path) -> None:
    stored, _ = _eight_bits(folder)
    lost = f"layers.1.{FUSED}_scale"
    scale = stored.pop(lost)
    _store(folder, stored)
    with pytest.raises(ConvertError, match=rf"layers.1.{FUSED} of type F8_E4M3, but no {lost}"):
        open_folder(folder)
    _store(folder, stored | {lost: scale[1:].clone()})
    with pytest.raises(ConvertError, match=r"with a number for each of its rows"):
        open_folder(folder)


def test_four_bits_are_refused_by_name(folder: Path) -> None:
    name = "layers.0.feed_forward.w1.weight"
    packed = {name: torch.zeros(640, 1, dtype=torch.uint8)}
    packed[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)
    save_file(packed, folder / f"{WEIGHTS}.safetensors")
    with pytest.raises(ConvertError, match=r"nf4, .* not read: give the weights in 8-bit floats"):
        open_folder(folder)
