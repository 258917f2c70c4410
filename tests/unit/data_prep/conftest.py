"""Folders of real images, and what comes out of packing them."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from PIL import Image

from data_prep.packing import PackOptions, Summary, pack_dataset
from data_prep.planning.splits import SplitFractions
from data_prep.sources.digits import Digits
from dit.codecs.text import ByteTable
from dit.codecs.vae import Pixel


def _image(index: int, width: int, height: int) -> Image.Image:
    """A ramp with some noise; every index gives another picture."""
    rng = np.random.default_rng(index)
    ramp = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
    return Image.fromarray((ramp + rng.integers(0, 15, (height, width, 3))).astype(np.uint8))


@pytest.fixture
def image_of() -> Callable[[int, int, int], Image.Image]:
    """An image by number, width and height."""
    return _image


@pytest.fixture
def picture_folder(tmp_path: Path) -> Callable[[int], Path]:
    """A folder with that many PNG files of various sizes, in folders, all captioned by name."""

    def make(count: int) -> Path:
        for index in range(count):
            path = tmp_path / "pictures" / f"part{index % 3}" / f"picture_{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            _image(index, 16 + 8 * (index % 4), 16 + 4 * (index % 5)).save(path)
        return tmp_path / "pictures"

    return make


@pytest.fixture
def read_samples() -> Callable[[Path], dict[str, dict[str, Any]]]:
    """All samples of a dataset folder by source: JSON fields, tensors, payload, key and shard."""

    def read(folder: Path) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        shards = (
            path for split in ("train", "val", "test") for path in (folder / split).glob("*.tar")
        )
        for shard in sorted(shards):
            with tarfile.open(shard) as tar:
                parts = {member.name: tar.extractfile(member).read() for member in tar}
            for name in parts:
                key, _, part = name.partition(".")
                if part != "json":
                    continue
                sample = json.loads(parts[name])
                tensors = safetensors.torch.load(parts[f"{key}.safetensors"])
                found[sample["source"]] = {
                    **sample,
                    **tensors,
                    "key": key,
                    "shard": shard,
                    "payload": parts[f"{key}.safetensors"],
                }
        return found

    return read


def _options(**changes: Any) -> PackOptions:
    given = {
        "split": SplitFractions.parse("0.6,0.3,0.1"),
        "shard_size": 20,
        "max_shard_bytes": 2**30,
        "max_bad_fraction": 0,
        "overwrite": False,
    }
    return PackOptions(**{**given, **changes})


def _pack_digits(
    folder: Path, source: Digits | None = None, codec: Pixel | None = None, **changes: Any
) -> Summary:
    return pack_dataset(
        source or Digits(num_samples=150),
        folder,
        codec=codec or Pixel.of(block=2, colours=1),
        text=ByteTable(width=16),
        options=_options(**changes),
        settings={"some": "setting"},
    )


@pytest.fixture(scope="session")
def options() -> Callable[..., PackOptions]:
    """Options that make several small shards in each split; any of them by name."""
    return _options


@pytest.fixture(scope="session")
def pack_digits() -> Callable[..., Summary]:
    """Packs 150 digits, or what a source gives, into a folder."""
    return _pack_digits


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 150 digits, which no test changes."""
    folder = tmp_path_factory.mktemp("packed") / "digits"
    _pack_digits(folder)
    return folder


@pytest.fixture
def content_of() -> Callable[[Path], dict[str, str]]:
    """A checksum of every file in a folder, by relative path."""

    def checksums(folder: Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and ".ledger" not in path.parts
        }

    return checksums
