"""Factors -> one folder that Diffusers, peft and ComfyUI read.

    pytorch_lora_weights.safetensors   Diffusers, with peft's configuration as metadata
    adapter_model.safetensors          peft, with adapter_config.json
    comfyui/lora.safetensors           ComfyUI and diffusion-pipe, in the original project's names

alpha / r is multiplied into B and alpha = r is written, so that a reader who finds no
configuration, and takes alpha as r, is right, too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dit.lora.factors import LoraFactors, in_order
from dit.lora.original_names import in_original_names
from dit.lora.read import DIFFUSERS_FILE, METADATA, NETWORK, PEFT_CONFIG, PEFT_FILE

COMFYUI_FILE = Path("comfyui") / "lora.safetensors"


def write_lora(
    folder: Path,
    factors: Mapping[str, LoraFactors],
    *,
    base: str | None = None,
    comfyui_names: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Fills an existing folder and returns the files of weights. Not atomic: see `new_folder`.

    `base` is the name that the weights below have on the hub, for peft's configuration.
    `comfyui_names` is the table of the names that ComfyUI has; None, or a table that lacks a
    module, writes no file for it.

    Raises:
        OSError: a file cannot be written.
    """
    ordered = in_order(factors)
    tensors = _tensors(ordered, dtype)
    content = _peft_config(ordered, base)
    own = {f"{NETWORK}.{key}": value for key, value in content.items()}
    config = folder / PEFT_CONFIG
    config.write_text(json.dumps(content, indent=2) + "\n")
    told = {"format": "pt", METADATA: json.dumps(own)}
    _save(folder / DIFFUSERS_FILE, _prefixed(f"{NETWORK}.", tensors), told, like=config)
    _save(folder / PEFT_FILE, _prefixed("base_model.model.", tensors), like=config)
    files = [folder / DIFFUSERS_FILE, folder / PEFT_FILE]
    renamed = None if comfyui_names is None else in_original_names(ordered, comfyui_names)
    if renamed is not None:
        files.append(folder / COMFYUI_FILE)
        files[-1].parent.mkdir()
        _save(files[-1], _prefixed("diffusion_model.", _tensors(renamed, dtype)), like=config)
    return files


def _tensors(factors: Mapping[str, LoraFactors], dtype: torch.dtype) -> dict[str, Tensor]:
    """Both factors of each module, with alpha / r in the second."""
    found = {}
    for module, one in factors.items():
        # Clones: factors may share memory, which safetensors refuses.
        found[f"{module}.lora_A.weight"] = one.down.to(dtype).contiguous().clone()
        found[f"{module}.lora_B.weight"] = one.folded().up.to(dtype).contiguous()
    return found


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _save(
    file: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
    *,
    like: Path,
) -> None:
    try:
        save_file(tensors, file, metadata=metadata or {"format": "pt"})
    except SafetensorError as error:  # for example, the disk is full
        raise OSError(str(error)) from error
    shutil.copymode(like, file)  # `save_file` makes files that only the owner can read


def _peft_config(factors: Mapping[str, LoraFactors], base: str | None) -> dict[str, Any]:
    """adapter_config.json: the commonest rank, and the others by pattern; alpha is the rank.

    peft matches names by their ends, so that `proj_out` alone would be every `*.proj_out`, too:
    `^` holds a pattern to the whole name, and one regular expression holds all targets where one of
    them has no dot.
    """
    ranks = {module: one.rank for module, one in factors.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{re.escape(module)}": r for module, r in ranks.items() if r != rank}
    targets: list[str] | str = list(factors)
    if any("." not in module for module in factors):
        targets = "|".join(map(re.escape, factors))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
