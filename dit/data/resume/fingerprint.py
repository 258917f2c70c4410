"""What a saved loader state belongs to. Energon itself restores most mismatches silently wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from megatron.energon.epathlib import EPath

from dit.config import Balance, DatasetConfig, RunConfig
from dit.data.cook import Expected
from dit.data.datasets import META, train_leaves
from dit.data.rejections import BEGIN_ANEW, DataError


def loader_identity(config: RunConfig) -> dict[str, Any]:
    """What decides which packs the training loaders of all ranks give, as plain values by name.

    The place of the data is not among them: a copy elsewhere resumes as well. Nor are ranks and
    workers, which may change (moving.py).
    """
    data, expected = config.dataset, Expected.of(config)
    even = data.balance is not Balance.NONE
    return {
        "dataset": _fingerprints(config),
        "weights of dataset.blend": [entry.weight for entry in data.blend],
        "dataset.mock_samples": [asdict(g) for g in data.mock_samples] if data.mock else [],
        "dataset.task_encoder_seq_length": data.task_encoder_seq_length,
        "dataset.packing_buffer_size": data.packing_buffer_size,
        "order of packing": "a full pack with the oldest sample",
        "dataset.balance": str(data.balance),
        "dataset.balance_packs": data.balance_packs if even else 0,
        "model sizes, which decide the cost of a pack": config.model.cost_sizes if even else [],
        "dataset.sample_multiple": data.sample_multiple,
        "dataset.shuffle_buffer_size": data.shuffle_buffer_size,
        "dataset.max_samples_per_sequence": data.max_samples_per_sequence,
        "rng.seed": config.rng.seed,
        "model.patch_temporal, patch_spatial": list(expected.layout.patch[:2]),
        "model.in_channels": expected.channels,
        "model.crossattn_emb_size": expected.text_width,
        "model.max_size of learnable positions": list(expected.table or ()),
        "megatron-energon": version("megatron-energon"),
    }


def check_identity(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, places: tuple[str, str]
) -> None:
    """Refuses a loader state of another run; `places` are the datasets of then and of now.

    Raises:
        DataError: names every item that differs, with both values.
    """
    names = dict.fromkeys([*saved, *current])
    differing = [
        f"\n  {name}: {_differing(name, saved.get(name), current.get(name), places)}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise DataError(
            "the loader state of the checkpoint belongs to other settings:"
            + "".join(differing)
            + f"\nSet them back to resume where the data stopped, or {BEGIN_ANEW}."
        )


def _differing(name: str, saved: Any, current: Any, places: tuple[str, str]) -> str:
    if name != "dataset":
        return f"{saved} when saved, {current} now"
    then, now = places
    if then == now:
        return f"{now} has other shards or splits now (index {saved} when saved, {current} now)"
    return f"{then} (index {saved}) when saved, {now} (index {current}) now"


def places_of(data: DatasetConfig) -> str:
    """The paths of a dataset, for messages."""
    if data.mock:
        return "mock data"
    return ", ".join(entry.path for entry in data.blend) or str(data.path)


def _fingerprints(config: RunConfig) -> list[str]:
    """One hash for each dataset folder, over its index, its splits and its settings."""
    hashes = [
        _hash_files([leaf.path / META / name for name in _INDEX]) for leaf in train_leaves(config)
    ]
    path = config.dataset.path
    if not config.dataset.mock and path is not None and EPath(path).is_file():
        hashes.append(_hash_files([EPath(path)]))
    return hashes


_INDEX = (".info.json", ".info.yaml", "split.yaml", "split.json", "dataset.yaml")


def _hash_files(paths: list[EPath]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
