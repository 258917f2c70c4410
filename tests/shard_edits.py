"""Copies of a dataset folder with a fault in them."""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]
SHARD = "train/shard-000000.tar"


def edited(source: Path, target: Path, change: Callable[[Tensors], Tensors], *, count: int) -> Path:
    """A copy of `source` whose first `count` training samples went through `change`.

    Checksums and index are those of the new payloads: the fault is in the numbers.
    """
    shutil.copytree(source, target)
    with tarfile.open(source / SHARD) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    for key in list(dict.fromkeys(name.partition(".")[0] for name in files))[:count]:
        tensors = change(safetensors.torch.load(files[f"{key}.safetensors"]))
        payload = safetensors.torch.save(tensors)
        about = json.loads(files[f"{key}.json"])
        about["crc32"] = {"safetensors": f"{zlib.crc32(payload):08x}"}
        files |= {f"{key}.safetensors": payload, f"{key}.json": json.dumps(about).encode()}
    _write(target / SHARD, files)
    return target


def _write(path: Path, files: dict[str, bytes]) -> None:
    starts, seen = [], set()
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            if (key := name.partition(".")[0]) not in seen:
                seen.add(key)
                starts.append(tar.offset)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        starts.append(tar.offset)
    path.with_suffix(".tar.idx").write_bytes(struct.pack(f"{len(starts)}Q", *starts))
