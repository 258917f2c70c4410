"""Reads a run folder as numbers and hashes by name; imports nothing of the project."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

Values = dict[str, Any]
"""Numbers and hashes of a run, by name."""
TIMED = {
    *("step_time_s", "tokens_per_s", "samples_per_s", "model_tflops", "peak_memory_gb"),
    *("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s"),
    *("validation_s", "sampling_s"),
}
"""Metrics that depend on time or memory, so that no two runs agree."""


def read_run(place: Path) -> dict[str, Values]:
    """The numbers and hashes in the run folder `place`, as {kind: {name: value}}."""
    lines = [json.loads(line) for line in text_of(place / "metrics.jsonl").splitlines()]
    kinds: dict[str, Values] = {kind: {} for kind in ("steps", "validation", "other metrics")}
    for at, line in enumerate(lines):
        for name, value in line.items():
            if name not in TIMED:
                values = kinds[_kind_of_metric(name)]
                values[f"line {at} step {line.get('step')} {name}"] = bits(value)
    for checkpoint in sorted(place.glob("checkpoints/step_*")):
        of = checkpoint.name
        kinds.setdefault("checkpoints", {}).update(_under(of, tensors_in(checkpoint)))
        kinds.setdefault("progress", {}).update(_under(of, common_of(checkpoint)))
        kinds.setdefault("loader states", {}).update(_under(of, loaders_of(checkpoint)))
        kinds.setdefault("configuration", {}).update(_under(of, config_of(checkpoint)))
    for part in ("generated", "exported"):
        kinds[part] = {n: v for d in sorted(place.glob(f"{part}_*")) for n, v in files_in(d)}
    kinds["imported"] = {
        f"{d.name} {name}": value
        for d in sorted(place.glob("imported_*"))
        for name, value in tensors_in(d).items()
    }
    kinds["samples"] = dict(files_in(place / "validation_generation"))
    names = (p for p in sorted(place.rglob("*")) if p.is_file() and "tfevents" not in p.name)
    kinds["file names"] = {str(p.relative_to(place)): "" for p in names}
    return {kind: values for kind, values in kinds.items() if values}


def _kind_of_metric(name: str) -> str:
    if name in ("step", "loss", "grad_norm"):
        return "steps"
    return "validation" if name.startswith("val_") else "other metrics"


def _under(prefix: str, values: Values) -> Values:
    return {f"{prefix} {name}": value for name, value in values.items()}


def tensors_in(checkpoint: Path) -> Values:
    """A hash of each tensor of a Megatron-Core checkpoint, by name; "object" for anything else."""
    reader = FileSystemReader(checkpoint)
    about = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in about.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):  # that one process alone reads
        load(tensors, storage_reader=reader, no_dist=True)
    others = {name: "object" for name in about if name not in tensors}
    return {name: fingerprint(t) for name, t in tensors.items()} | others


def common_of(checkpoint: Path) -> Values:
    """Entries of Megatron-Core's common.pt by path: steps, samples, settings of the optimizer."""
    return dict(flat(torch.load(checkpoint / "common.pt", weights_only=False)))


def loaders_of(checkpoint: Path) -> Values:
    """Positions of the loaders in their data, by path in the saved state.

    Names of classes are left out, because they may change.
    """
    found: Values = {}
    for file in sorted(checkpoint.glob("loader_*.pt")):
        state = torch.load(file, weights_only=True)
        state["readers"] = _Readers(io.BytesIO(state["readers"])).load()
        found |= dict(flat(state, file.name))
    return found


class _Readers(pickle.Unpickler):
    """An unpickler that reads instances of this project's classes as lists of their values."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "dit":
            return _Instance
        return super().find_class(module, name)


class _Instance:
    def __setstate__(self, state: Any) -> None:
        self.state = state


def config_of(checkpoint: Path) -> Values:

    return dict(flat(yaml.safe_load((checkpoint / "config.yaml").read_text())))


def files_in(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value or hash of each tensor, picture and setting in a folder."""
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder.parent))
        if file.suffix == ".safetensors":
            yield from ((f"{name} {key}", fingerprint(t)) for key, t in load_file(file).items())
        elif file.suffix == ".png":
            yield name, fingerprint(Image.open(file).tobytes())
        elif file.suffix == ".json":
            yield from flat(json.loads(file.read_text()), name)
        elif file.is_file():
            yield name, sha(file.read_bytes())


def text_of(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the (path, fingerprint) pairs of the values in nested containers."""
    if isinstance(value, _Instance):
        value = value.state
    if isinstance(value, dict):
        pairs = [(str(key), inner) for key, inner in value.items() if key != "__class__"]
    elif isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        pairs = [(str(index), inner) for index, inner in enumerate(value)]
    else:
        yield name, fingerprint(value)
        return
    for key, inner in pairs:
        yield from flat(inner, f"{name}.{key}" if name else key)


def fingerprint(value: Any) -> Any:
    """A short value for JSON that is equal only for equal bits."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {sha(raw)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} {sha(value.tobytes())}"
    return sha(value) if isinstance(value, bytes) else bits(value)


def bits(value: Any) -> Any:
    """A float as its hexadecimal digits; anything else as its `repr`, or the hash of a long one."""
    if isinstance(value, float):
        return value.hex()
    said = repr(value)
    return said if len(said) <= 200 else sha(said.encode())


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
