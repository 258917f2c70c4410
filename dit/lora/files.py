"""Reads files of adapters, by Diffusers' names of modules, and writes them.

Reading a folder or file:

1. find     the safetensors file of a folder, and the configuration that belongs to it
2. parse    each key: module and factor                                    (names.py)
3. check    types, shapes, finite numbers; rank and alpha                  (peft_config.py)

Writing makes one folder that Diffusers, peft and ComfyUI read:

    pytorch_lora_weights.safetensors   Diffusers, with peft's configuration as metadata
    adapter_model.safetensors          peft, with adapter_config.json
    comfyui/lora.safetensors           ComfyUI and diffusion-pipe, in the original project's names

B is multiplied by alpha / r, and alpha = r is written, so that programs that do not read the
configuration, and assume alpha = r, apply the same adapter.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dit.config import ModelConfig
from dit.lora.factors import FactorsByModule, LoraFactors, LoraFileError, in_order, linear_shapes
from dit.lora.names import (
    SWAPPED,
    Factor,
    LoraKey,
    companion_with,
    in_original_names,
    is_of_text_encoder,
    parse_keys,
)
from dit.lora.peft_config import PeftConfig, config_content, peft_config
from dit.parsing import parse_json
from dit.system_errors import reason

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
COMFYUI_FILE = Path("comfyui") / "lora.safetensors"
METADATA = "lora_adapter_metadata"
"""Key of a file's metadata under which Diffusers stores peft's configuration, as JSON."""
NETWORK = "transformer"
_PEFT = "base_model.model."
_COMFYUI = "diffusion_model."
_TYPES = {"F32", "BF16", "F16"}
_ALPHA_TYPES = {"F64", "I64", "I32"}
"""Dtypes that only alpha may have: some scripts store it as a Python number."""
_MOST_JSON = 4 * 2**20  # bytes


def read_lora(
    path: Path,
    model: ModelConfig | None = None,
    *,
    without_text_encoder: Callable[[str], None] | None = None,
) -> dict[str, LoraFactors]:
    """The adapters of a file or folder, by module names of Diffusers' network.

    A folder is one of peft, of Diffusers' `save_lora_weights` and `save_lora_adapter`, of
    diffusion-pipe, or an export of this project. Without a configuration or alphas, alpha is the
    rank. Names that several original projects share are read as those of `model`'s project. Keys of
    text encoders are refused, or left out if `without_text_encoder` is given, which gets a line
    with their number.

    Raises:
        LoraFileError: names the file and the key, and the remedy.
    """
    file = _find(path)
    tensors, metadata = _tensors(file, without_text_encoder)
    keys = parse_keys(tensors, model=model, place=file)
    configs = _configs(file, metadata)
    modules = _by_module(keys, file)
    alone = (
        one for parts in modules.values() if Factor.ALPHA not in parts for one in parts.values()
    )
    if not configs and (lost := [one.key for one in alone if one.key.startswith(_PEFT)]):
        raise LoraFileError(
            f"{file}: {lost[0]} was written by peft, but {PEFT_CONFIG}, which holds alpha, is"
            " missing; without alpha the adapter would have another strength. Put"
            f" {PEFT_FILE} and {PEFT_CONFIG} into one folder; if alpha is known to be the rank,"
            f' write {PEFT_CONFIG} with {{"r": RANK, "lora_alpha": RANK}}'
        )
    found: dict[str, LoraFactors] = {}
    for module, parts in modules.items():
        told = _told(configs, next(iter(parts.values())))
        apart = _apart(module, _factors(file, parts, tensors, *told), model, file)
        if twice := sorted(found.keys() & apart.keys()):
            raise LoraFileError(
                f"{file}: {next(iter(parts.values())).key} belongs to {twice[0]}, for which the"
                " file has another adapter, too; remove one of the two"
            )
        found |= apart
    return in_order(found)


def _apart(
    modules: str, one: LoraFactors, model: ModelConfig | None, file: Path
) -> dict[str, LoraFactors]:
    """Adapters by Diffusers' module, from the adapter `one` of a linear of another project.

    `modules` are the names of the linears that it fuses in Diffusers, with blanks between them, or
    one name, which SWAPPED may follow. All these linears get the same A. The outputs of B are
    divided by the widths of the linears in `model`; if `model` does not say, each linear takes as
    many outputs as it has inputs, and the last one takes the remaining outputs.

    Raises:
        LoraFileError: the outputs do not suffice for all modules.
    """
    if modules.endswith(SWAPPED):
        return {modules.removesuffix(SWAPPED): one.swapped()}
    names = modules.split()
    if len(names) == 1:
        return {modules: one}
    width, outputs = one.down.shape[1], one.up.shape[0]
    made = [*(width,) * (len(names) - 1), outputs - (len(names) - 1) * width]
    shapes = {} if model is None else linear_shapes(model)
    if shapes.keys() >= {*names} and sum(shapes[name][0] for name in names) == outputs:
        made = [shapes[name][0] for name in names]
    if made[-1] <= 0:
        raise LoraFileError(
            f"{file}: an adapter with {width} inputs and {outputs} outputs is too narrow for"
            f" {', '.join(names)} together; give adapters that were trained for this network"
        )
    ups = one.up.split(made)
    return {name: replace(one, up=up) for name, up in zip(names, ups, strict=True)}


def _find(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise LoraFileError(
                f"{path} is not a .safetensors file, and other files are not read, because a"
                " pickle can run code; open it in the tool that wrote it, and save it as"
                " .safetensors"
            )
        return path
    if not path.is_dir():
        raise LoraFileError(f"{path} does not exist; give a file or folder of adapters")
    for name in (PEFT_FILE, DIFFUSERS_FILE):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise LoraFileError(
            f"{path} holds {len(files)} .safetensors files ({names}); give the path of one of them"
        )
    pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
    why = f" ({pickles[0].name} is a pickle, which can run code)" if pickles else ""
    raise LoraFileError(
        f"{path} holds no .safetensors file{why}; save the adapters as .safetensors"
    )


def _tensors(
    file: Path, without_text_encoder: Callable[[str], None] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns (tensors of `file` by key in float32, its metadata).

    If `without_text_encoder` is given, keys of text encoders are left out, and it gets a line that
    says so.

    Raises:
        LoraFileError: the file is damaged, or has no adapters or unusable tensors.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            metadata, names = opened.metadata() or {}, list(opened.keys())
            left_out = [*filter(is_of_text_encoder, names)] if without_text_encoder else []
            found = {n: _tensor(file, n, opened) for n in names if n not in set(left_out)}
    except (SafetensorError, OSError) as error:
        raise LoraFileError(
            f"{file} is damaged ({reason(error)}); copy or save it again"
        ) from error
    if not found:
        what = f"only {len(left_out)} keys of text encoders" if left_out else "no tensors"
        raise LoraFileError(f"{file} holds {what}; save the adapters of the transformer")
    if without_text_encoder and left_out:
        without_text_encoder(
            f"{file}: {len(left_out)} of {len(names)} keys are of text encoders and were left out,"
            f" such as {left_out[0]}; a text encoder that was trained with the adapters would"
            " encode prompts differently"
        )
    return found, metadata


def _tensor(file: Path, name: str, opened: Any) -> Tensor:
    stored = opened.get_slice(name).get_dtype()
    if stored not in _TYPES and not (name.endswith("alpha") and stored in _ALPHA_TYPES):
        raise LoraFileError(
            f"{file}: {name} is of type {stored}; save it as one of {', '.join(sorted(_TYPES))}"
        )
    tensor = opened.get_tensor(name).float()
    if not tensor.isfinite().all():
        raise LoraFileError(
            f"{file}: {name} holds NaN or infinity, because its training failed; give a file that"
            " was saved earlier"
        )
    return tensor.clone()


def _configs(file: Path, metadata: Mapping[str, str]) -> dict[str, PeftConfig]:
    """The peft configurations of `file`, by network; "" stands for all networks.

    The mapping is empty if the file has no configuration.
    """
    beside = file.with_name(PEFT_CONFIG)
    if METADATA in metadata:
        text, place = metadata[METADATA].encode(), f"{file} ({METADATA})"
    elif file.name == PEFT_FILE and beside.is_file():
        if beside.stat().st_size > _MOST_JSON:
            raise LoraFileError(
                f"{beside} has {beside.stat().st_size} bytes, more than the {_MOST_JSON} that such"
                " a file may have; save the adapter again"
            )
        text, place = beside.read_bytes(), str(beside)
    else:
        return {}
    try:
        content = parse_json(text)
    except ValueError as error:
        raise LoraFileError(
            f"{place} is not valid JSON ({error}); save the adapter again"
        ) from error
    if not isinstance(content, dict):
        raise LoraFileError(
            f"{place} must hold a JSON object, not a {type(content).__name__}; save the adapter"
            " again"
        )
    # Diffusers' pipelines write the name of the network before each key.
    found: dict[str, dict[str, Any]] = {} if content else {"": {}}
    for key, value in content.items():
        network = _network(key) if "." in key else ""
        found.setdefault(network, {})[key.removeprefix(f"{network}.")] = value
    return {network: peft_config(own, place=place) for network, own in found.items()}


def _network(name: str) -> str:
    """Folder of the network (transformer or companion) in the prefix of a module's `name`."""
    second = companion_with(name)
    return NETWORK if second is None else second.folder


def _told(configs: Mapping[str, PeftConfig], key: LoraKey) -> tuple[PeftConfig | None, str]:
    """(peft configuration for the module of `key`, or None; name of the module in it)."""
    network = _network(key.module)
    if network in configs:
        return configs[network], key.written.removeprefix(f"{network}.")
    return configs.get(""), key.written


def _by_module(keys: list[LoraKey], file: Path) -> dict[str, dict[Factor, LoraKey]]:
    modules: dict[str, dict[Factor, LoraKey]] = {}
    for key in keys:
        parts = modules.setdefault(key.module, {})
        if key.part in parts:
            raise LoraFileError(
                f"{file}: {key.key} and {parts[key.part].key} are both {key.part} of {key.module};"
                " remove one, or save the adapter again in one format"
            )
        parts[key.part] = key
    return modules


def _factors(
    file: Path,
    parts: dict[Factor, LoraKey],
    tensors: dict[str, Tensor],
    told: PeftConfig | None,
    written: str,
) -> LoraFactors:
    """A [R, I], B [O, R] and alpha of one module, from `tensors` and peft's configuration `told`.

    The configuration calls the module `written`.
    """
    some = next(iter(parts.values()))
    if lost := [part for part in (Factor.DOWN, Factor.UP) if part not in parts]:
        raise LoraFileError(
            f"{file} has {some.key}, but no {lost[0]} of the same module; save the whole adapter"
            " again"
        )
    down, up = (tensors[parts[part].key] for part in (Factor.DOWN, Factor.UP))
    _check_shapes(file, parts, down, up)
    rank = down.shape[0]
    if told is not None and (said := told.rank(written)) != rank:
        raise LoraFileError(
            f"{told.place} gives {written} the rank {said}, but {parts[Factor.DOWN].key} has rank"
            f" {rank}. Use the configuration that was saved with these adapters; if two patterns"
            " of its rank_pattern fit this module (peft sorts them in saving), write the module's"
            " whole name there"
        )
    alpha = float(rank) if told is None else told.alpha(written)
    if Factor.ALPHA not in parts:
        place = "" if told is None else f"{told.place}, of {written}"
        return LoraFactors(down=down, up=up, alpha=_positive(alpha, place))
    key = parts[Factor.ALPHA].key
    if tensors[key].numel() != 1:
        raise LoraFileError(
            f"{file}: {key} has shape {list(tensors[key].shape)}, and alpha must be one number;"
            " save the adapter again"
        )
    stored = _positive(tensors[key].item(), f"{file}: {key}")
    if told is not None and not math.isclose(stored, alpha, rel_tol=1e-2):  # bfloat16 has 3 digits
        raise LoraFileError(
            f"{told.place} gives {written} alpha {alpha:g}, but {key} is {stored:g}; remove one of"
            " the two"
        )
    return LoraFactors(down=down, up=up, alpha=stored)


def _positive(alpha: float, place: str) -> float:
    if alpha <= 0:
        raise LoraFileError(
            f"{place}: alpha is {alpha:g}, but must be above 0; save the adapter with the alpha of"
            " its training"
        )
    return alpha


def _check_shapes(file: Path, parts: dict[Factor, LoraKey], down: Tensor, up: Tensor) -> None:
    """Refuses tensors that are not A [R, I] and B [O, R] with R > 0."""
    for part, factor in ((Factor.DOWN, down), (Factor.UP, up)):
        if factor.ndim != 2 or 0 in factor.shape:
            what = "that of a convolution" if factor.ndim > 2 else "not that of a matrix"
            raise LoraFileError(
                f"{file}: {parts[part].key} has shape {list(factor.shape)}, {what}; only linears"
                " can have adapters here: merge this adapter into the base in the tool that made"
                " it"
            )
    if down.shape[0] != up.shape[1]:
        raise LoraFileError(
            f"{file}: {parts[Factor.DOWN].key} of shape {list(down.shape)} and"
            f" {parts[Factor.UP].key} of shape {list(up.shape)} have different ranks; save the"
            " adapter again"
        )


def write_lora(
    folder: Path,
    factors: FactorsByModule,
    *,
    base: str | None = None,
    comfyui_names: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Writes adapter files into an existing folder and returns their paths; not atomic.

    `base` is the base model's name on the hub, for peft's configuration. `comfyui_names` is
    ComfyUI's table of names; without it, or if it lacks a module, no file for ComfyUI is written.

    Raises:
        OSError: a file cannot be written.
    """
    ordered = in_order(factors)
    tensors = _folded(ordered, dtype)
    content = config_content(ordered, base)
    by_network: dict[str, dict[str, LoraFactors]] = {}
    for module, one in ordered.items():
        network = _network(module)
        by_network.setdefault(network, {})[module.removeprefix(f"{network}.")] = one
    own = {
        f"{network}.{key}": value
        for network, its in by_network.items()
        for key, value in config_content(its, base).items()
    }
    config = folder / PEFT_CONFIG
    config.write_text(json.dumps(content, indent=2) + "\n")
    told = {"format": "pt", METADATA: json.dumps(own)}
    named = {
        name if companion_with(name) else f"{NETWORK}.{name}": one for name, one in tensors.items()
    }
    _save(folder / DIFFUSERS_FILE, "", named, told, like=config)
    _save(folder / PEFT_FILE, _PEFT, tensors, like=config)
    files = [folder / DIFFUSERS_FILE, folder / PEFT_FILE]
    renamed = None if comfyui_names is None else in_original_names(ordered, comfyui_names)
    if renamed is not None:
        files.append(folder / COMFYUI_FILE)
        files[-1].parent.mkdir()
        _save(files[-1], _COMFYUI, _folded(renamed, dtype), like=config)
    return files


def _folded(factors: FactorsByModule, dtype: torch.dtype) -> dict[str, Tensor]:
    """A and B of each module in `dtype`, with alpha / r multiplied into B."""
    found = {}
    for module, one in factors.items():
        # Clones: factors may share memory, which safetensors refuses.
        found[f"{module}.lora_A.weight"] = one.down.to(dtype).contiguous().clone()
        found[f"{module}.lora_B.weight"] = one.folded().up.to(dtype).contiguous()
    return found


def _save(
    file: Path,
    prefix: str,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None = None,
    *,
    like: Path,
) -> None:
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    try:
        save_file(named, file, metadata=metadata or {"format": "pt"})
    except SafetensorError as error:  # for example, the disk is full
        raise OSError(str(error)) from error
    shutil.copymode(like, file)  # `save_file` makes files that only the owner can read
