"""Files that a user meets and that cannot be read: errors name the file, the key, the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dit.lora.factors import LoraFileError
from dit.lora.files import read_lora
from tests.tables import table

DOWN, UP = torch.ones(2, 6), torch.ones(4, 2)
A, B = (
    "transformer.blocks.0.attn1.to_q.lora_A.weight",
    "transformer.blocks.0.attn1.to_q.lora_B.weight",
)
GOOD = {A: DOWN, B: UP}


def refused(tmp_path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> str:
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(own, tmp_path / "x.safetensors", metadata=metadata)
    return error_of(tmp_path / "x.safetensors")


def error_of(place: Path) -> str:
    with pytest.raises(LoraFileError) as error:
        read_lora(place)
    assert place.name in str(error.value)
    return str(error.value)


METHODS = table(__file__, "methods")


@pytest.mark.parametrize("key", METHODS)
def test_keys_of_other_methods_are_refused_by_name(key: str, tmp_path: Path) -> None:
    text = refused(tmp_path, GOOD | {key: torch.ones(2, 2)})
    assert key in text
    assert METHODS[key] in text


TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no B": ({A: DOWN}, "no lora_B of the same module"),
    "no A": ({B: UP}, "no lora_A of the same module"),
    "alpha alone": ({**GOOD, "transformer.m.alpha": torch.tensor(1.0)}, "no lora_A"),
    "two ranks": ({A: DOWN, B: torch.ones(4, 3)}, "have different ranks"),
    "a convolution": ({A: torch.ones(2, 6, 1, 1), B: torch.ones(4, 2, 1, 1)}, "a convolution"),
    "a vector": ({A: torch.ones(2), B: UP}, "not that of a matrix"),
    "rank 0": ({A: torch.ones(0, 6), B: torch.ones(4, 0)}, "not that of a matrix"),
    "NaN": ({A: DOWN, B: torch.full((4, 2), float("nan"))}, "NaN or infinity"),
    "infinity": ({A: torch.full((2, 6), float("inf")).half(), B: UP.half()}, "NaN or infinity"),
    "whole numbers": ({A: DOWN.int(), B: UP}, "is of type I32"),
    "8 bits": ({A: DOWN.to(torch.float8_e4m3fn), B: UP}, "is of type F8_E4M3"),
    "alpha of two numbers": (
        {**GOOD, "transformer.blocks.0.attn1.to_q.alpha": torch.ones(2)},
        "alpha must be one number",
    ),
    "alpha that is no number": (
        {**GOOD, "transformer.blocks.0.attn1.to_q.alpha": torch.tensor(float("nan"))},
        "NaN or infinity",
    ),
    "one module under two names": (
        {**GOOD, "diffusion_model.blocks.0.self_attn.q.lora_A.weight": DOWN},
        "are both lora_A of blocks.0.attn1.to_q; remove one",
    ),
    "a part of a fused linear": (
        {
            "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": torch.ones(2, 4),
            "diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight": torch.ones(12, 2),
            "transformer.transformer_blocks.0.attn.to_k.lora_A.weight": torch.ones(2, 4),
            "transformer.transformer_blocks.0.attn.to_k.lora_B.weight": torch.ones(4, 2),
        },
        "belongs to transformer_blocks.0.attn.to_k, for which the file has another adapter",
    ),
    "two adapters": (
        {f"m.{part}.{name}.weight": UP for part in ("lora_A", "lora_B") for name in ("a", "b")},
        "several adapters (a, b)",
    ),
    "peft's keys without its configuration": (
        {"base_model.model.m.lora_A.weight": DOWN, "base_model.model.m.lora_B.weight": UP},
        "adapter_config.json, which holds alpha, is missing",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    tensors, wanted = TENSORS[case]
    assert wanted in refused(tmp_path, tensors)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"r": 4}, "gives blocks.0.attn1.to_q the rank 4"),
    "another rank by pattern": ({"r": 2, "rank_pattern": {".*to_q": 3}}, "the rank 3, but"),
    "DoRA": ({"use_dora": True}, "use_dora=True is not supported"),
    "biases": ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
    "bias of B": ({"lora_bias": True}, "lora_bias=True is not supported"),
    "whole modules": ({"modules_to_save": ["norm"]}, "modules_to_save=['norm']"),
    "another method": ({"peft_type": "LOKR"}, "peft_type='LOKR'"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
    "rank 0": ({"r": 0}, "r=0: "),
    "a rank in words": ({"r": "2"}, "r='2': "),
    "rank true": ({"r": True}, "r=True: "),
    "alpha in words": ({"lora_alpha": "x"}, "lora_alpha='x': "),
    "a pattern of lists": ({"alpha_pattern": {"a": [1]}}, "alpha_pattern.a=[1]: "),
    "a pattern that is no pattern": ({"alpha_pattern": {"(": 1}}, "is not a regular expression"),
    "a pattern without end": ({"alpha_pattern": {"(a+)+b": 1}}, "could take too long"),
    "many repetitions": ({"alpha_pattern": {".*" * 8: 1}}, "could take too long"),
    "a long pattern": ({"alpha_pattern": {"a" * 2000: 1}}, "could take too long"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(case: str, tmp_path: Path) -> None:
    """In the metadata of Diffusers' file, and in peft's file."""
    content, wanted = CONFIGS[case]
    content = {"peft_type": "LORA", "r": 2, "lora_alpha": 2} | content
    text = refused(tmp_path, GOOD, lora_adapter_metadata=json.dumps(content))
    assert wanted in text
    assert "lora_adapter_metadata" in text
    folder = tmp_path / "peft"
    folder.mkdir()
    save_file(GOOD, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(LoraFileError, match=r"adapter_config\.json") as error:
        read_lora(folder)
    assert wanted in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"\\ud800"'])
def test_a_configuration_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    save_file(GOOD, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(LoraFileError, match=r"adapter_config\.json.* JSON"):
        read_lora(tmp_path)


def test_alphas_that_contradict_each_other(tmp_path: Path) -> None:
    alpha = {"transformer.blocks.0.attn1.to_q.alpha": torch.tensor(4.0)}
    told = {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 2})}
    assert "alpha 2, but" in refused(tmp_path, GOOD | alpha, **told)


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "nowhere")
    assert "holds no .safetensors file" in error_of(tmp_path)
    pickle = tmp_path / "pytorch_lora_weights.bin"
    torch.save(GOOD, pickle)
    assert "can run code" in error_of(pickle)
    assert "pytorch_lora_weights.bin is a pickle" in error_of(tmp_path)
    file = tmp_path / "x.safetensors"
    save_file({}, file)
    assert "holds no tensors" in error_of(file)
    save_file(GOOD, file)
    whole = file.read_bytes()
    for damaged in (b"", whole[:20], whole[:-3], b"\xff" * len(whole)):
        file.write_bytes(damaged)
        assert "is damaged" in error_of(file)
    save_file(GOOD, file)
    save_file(GOOD, tmp_path / "y.safetensors")
    assert "holds 2 .safetensors files (x.safetensors, y.safetensors)" in error_of(tmp_path)
