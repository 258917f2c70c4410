"""Small datasets that the tests write themselves, in the layout of the shards we read."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dit.config import DatasetConfig, MockGeometry, RngConfig, RunConfig, TrainConfig
from dit.data import PackLoader, ValidationPacks, build_train_loader, validation_groups
from dit.models.dit.family import DitConfig
from dit.sizing.flops import work_of_packs

CHANNELS, WIDTH = 2, 8
Parts = dict[str, bytes]
SIZES = ((1, 4, 4), (1, 8, 6), (2, 6, 6), (1, 10, 4), (3, 4, 8), (1, 2, 2), (2, 10, 10))


def ours(
    latent: torch.Tensor,
    text: torch.Tensor | None,
    loss_mask: torch.Tensor | None = None,
    latent_logvar: torch.Tensor | None = None,
    **about: Any,
) -> Parts:
    """Parts of a sample in our layout; `about` goes into its .json."""
    every = {"latent": latent, "text": text, "loss_mask": loss_mask}
    every["latent_logvar"] = latent_logvar
    tensors = {name: tensor for name, tensor in every.items() if tensor is not None}
    payload = safetensors.torch.save(tensors)
    described = {
        "format_version": 1,
        "caption": "",
        "fps": None,
        "crc32": {"safetensors": f"{zlib.crc32(payload):08x}"},
    }
    return {"safetensors": payload, "json": json.dumps(described | about).encode()}


def dfm(latent: torch.Tensor, text: Any, **about: Any) -> Parts:
    """Parts of a sample as NVIDIA's DFM writes them."""
    buffer = io.BytesIO()
    torch.save(latent, buffer)
    return {
        "pth": buffer.getvalue(),
        "pickle": pickle.dumps(text),
        "json": json.dumps(about).encode(),
    }


def good(index: int) -> Parts:
    """A sample whose latent is `index` everywhere in channel 0 and noise elsewhere."""
    size = SIZES[index % len(SIZES)]
    rng = torch.Generator().manual_seed(index)
    latent = torch.randn((CHANNELS, *size), generator=rng).half()
    latent[0] = index
    text = torch.randn((1 + index % 5, WIDTH), generator=rng).bfloat16()
    return ours(latent, text, caption=f"number {index}", fps=None if size[0] == 1 else 12.0)


def write_dataset(
    root: Path, samples: Sequence[Parts], *, per_shard: int = 20, first: int = 0, split="train"
) -> Path:
    """Shards, their indices and `.nv-meta`, as `energon prepare` leaves them."""
    counts = {}
    for number, start in enumerate(range(0, len(samples), per_shard)):
        name = f"{split}/shard-{number:06d}.tar"
        chosen = samples[start : start + per_shard]
        _write_shard(root / name, {f"{first + start + i:06d}": p for i, p in enumerate(chosen)})
        counts[name] = len(chosen)
    _write_meta(root, split, counts)
    return root


def _write_shard(path: Path, samples: dict[str, Parts]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = [0]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, parts in samples.items():
            for extension, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            offsets.append(tar.offset)
    path.with_suffix(".tar.idx").write_bytes(struct.pack(f"{len(offsets)}Q", *offsets))


def _write_meta(root: Path, split: str, counts: dict[str, int]) -> None:
    meta = root / ".nv-meta"
    meta.mkdir(exist_ok=True)
    info, splits = meta / ".info.json", meta / "split.yaml"
    shards = json.loads(info.read_text())["shard_counts"] if info.exists() else {}
    shards |= counts
    parts = {name: [s for s in shards if s.startswith(name)] for name in ("train", "val", "test")}
    info.write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": shards}))
    splits.write_text(json.dumps({"split_parts": parts, "exclude": []}))  # JSON is YAML
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def run_config(path: Path | None = None, **data: Any) -> RunConfig:
    """A small model and packs of 64 tokens; `data` overrides the dataset's settings."""
    defaults = {
        "path": None if path is None else str(path),
        "task_encoder_seq_length": 64,
        "sample_multiple": 4,
        "packing_buffer_size": 16,
        "shuffle_buffer_size": 12,
        "max_samples_per_sequence": 5,
        "num_workers": 0,
        "mock_samples": (
            MockGeometry(frames=1, height=4, width=6, text_length=1, weight=2.0),
            MockGeometry(frames=3, height=8, width=6, text_length=4, fps=8.0),
            MockGeometry(frames=1, height=6, width=6, text_length=3),
        ),
    }
    return RunConfig(
        model=replace(DitConfig(), in_channels=CHANNELS, crossattn_emb_size=WIDTH),
        dataset=DatasetConfig(**(defaults | data)),
        train=TrainConfig(global_batch_size=2),
        rng=RngConfig(seed=7),
    )


@dataclass(frozen=True)
class Shards:
    """What the tests of a loader need, by name."""

    ours: Callable[..., Parts] = ours
    dfm: Callable[..., Parts] = dfm
    good: Callable[[int], Parts] = good
    write: Callable[..., Path] = write_dataset
    config: Callable[..., RunConfig] = run_config
    channels: int = CHANNELS
    width: int = WIDTH

    def good_set(self, root: Path, count: int, **kwargs: Any) -> Path:
        first = kwargs.get("first", 0)
        return write_dataset(root, [good(i) for i in range(first, first + count)], **kwargs)

    def one_pass(self, config: RunConfig) -> ValidationPacks:
        """All validation packs."""
        groups = validation_groups(config, work=work_of_packs(config.model, config.dataset))
        plan = groups.plan(10**4)
        return plan.packs(list(groups.read(plan.groups)), late=groups.late)

    def take(self, packs: Iterable, count: int) -> list[tuple[str, ...]]:
        """Keys of the next packs."""
        return [pack.keys for _, pack in zip(range(count), packs, strict=False)]


def built(config: RunConfig, *, rank: int, world_size: int) -> PackLoader:
    """A loader as runs build it."""
    ranks = {"rank": rank, "world_size": world_size}
    return build_train_loader(config, **ranks, work=work_of_packs(config.model, config.dataset))


@pytest.fixture(scope="session")
def shards() -> Shards:
    return Shards()


@pytest.fixture
def opened():
    """Registers loaders to close when the test ends."""
    loaders: list = []

    def register(loader):
        loaders.append(loader)
        return loader

    yield register
    for loader in loaders:
        loader.close()
