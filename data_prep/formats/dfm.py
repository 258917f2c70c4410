"""Shards of NVIDIA DFM: `.pth` (latent), `.pickle` (text) and `.json` under one key."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from data_prep.formats.records import Record, as_latent, as_text, damage_refused, untrusted
from data_prep.inspection import read_samples
from data_prep.refusals import Reason, RefusedError
from data_prep.shards import ShardSeries

FOLDER = "dfm_shards"


def write_dfm(records: Iterable[Record], folder: Path, *, shard_size: int) -> int:
    """Writes `rank0-000000.tar`, ...; tensors are saved so that weights_only loads them."""
    total = 0
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    with ShardSeries(target, max_samples=shard_size, max_bytes=2**40, prefix="rank0-") as series:
        for record in records:
            latent, text = record.tensors["latent"][None], record.tensors["text"][None]
            about = {
                **record.about,
                "image_height": record.about["height"],
                "image_width": record.about["width"],
            }
            parts = {"pth": _saved(latent), "pickle": _saved(text)}
            series.write(record.key, {**parts, "json": json.dumps(about).encode()})
            total += 1
    return total


def _saved(tensor: Any) -> bytes:
    content = io.BytesIO()
    torch.save(tensor.contiguous(), content)
    return content.getvalue()


def read_dfm(folder: Path) -> Iterator[Record | RefusedError]:
    """Every sample of every tar below `folder`."""
    for path in sorted(folder.rglob("*.tar")):
        for _, key, parts in read_samples(path):
            yield _record(f"{path.stem}/{key}", key, parts)


def _record(name: str, key: str, parts: dict[str, bytes]) -> Record | RefusedError:
    try:
        with damage_refused(name):
            return _checked(name, key, parts)
    except RefusedError as refused:
        return refused


def _checked(name: str, key: str, parts: dict[str, bytes]) -> Record:
    if not {"pth", "pickle", "json"} <= set(parts):
        raise RefusedError(Reason.UNREADABLE, f"{name} has only {', '.join(parts)}")
    text = untrusted(io.BytesIO(parts["pickle"]))
    about = json.loads(parts["json"])
    latent = as_latent(untrusted(io.BytesIO(parts["pth"])), name)
    tensors = {"latent": latent}
    if isinstance(text, dict):
        pooled = text.get("pooled_prompt_embeds", text.get("clip_embeds"))
        text = text.get("prompt_embeds", text.get("t5_embeds"))
        if pooled is not None:
            tensors["pooled_text"] = pooled.reshape(-1)
    tensors["text"] = as_text(text, name)
    # Their image_height and image_width are taken from other axes and cannot be trusted.
    height, width = 8 * latent.shape[2], 8 * latent.shape[3]
    known = {"caption": "", "source": name, "height": height, "width": width, "fps": None}
    known |= {"original_height": height, "original_width": width, "num_frames": latent.shape[1]}
    return Record(key=key, tensors=tensors, about={k: about.get(k, v) for k, v in known.items()})
