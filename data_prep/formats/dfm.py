"""Shards of NVIDIA DFM: `.pth` (latent), `.pickle` (text) and `.json` under one key."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    check_regular,
    checked_description,
    load_untrusted,
    read_or_refuse,
    to_latent,
    to_pooled,
    to_text,
)
from data_prep.inspect.read_shards import read_samples
from data_prep.planning.splits import key_of
from data_prep.refusals import Reason, RefusedError
from data_prep.writing.tar_shards import ShardSeries
from dit.parsing import parse_json

FOLDER = "dfm_shards"


def write_dfm(records: Iterable[CachedSample], folder: Path, *, shard_size: int) -> int:
    """Writes `rank0-000000.tar`, ...; returns the number of samples."""
    # DFM decodes by webdataset: `.pth` by torch.load, `.pickle` by pickle.loads, which cannot read
    # what torch.save writes.
    total = 0
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    with ShardSeries(target, max_samples=shard_size, max_bytes=2**40, prefix="rank0-") as series:
        for record in records:
            latent, text = _as_theirs(record.tensors)
            about = {
                **record.about,
                "image_height": record.about["height"],
                "image_width": record.about["width"],
            }
            parts = {"pth": _saved(latent), "pickle": pickle.dumps(text)}
            series.write(record.key, {**parts, "json": json.dumps(about).encode()})
            total += 1
    return total


def _as_theirs(tensors: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Latent and text for DFM: batch axes, but for FLUX, whose text also has the pooled one."""
    latent, text = tensors["latent"].contiguous(), tensors["text"].contiguous()
    if "pooled_text" in tensors:
        pooled = tensors["pooled_text"].contiguous()
        return latent[:, 0].clone(), {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
    return latent[None], text[None]


def _saved(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    torch.save(tensor, content)
    return content.getvalue()


def read_dfm(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Every sample of every tar below `folder`."""
    for path in sorted(folder.rglob("*.tar")):
        try:
            check_regular(path)
            for _, key, parts in read_samples(path):
                name = f"{path.stem}/{key}"
                yield read_or_refuse(name, lambda n=name, k=key, p=parts: _record(n, k, p))
        except (tarfile.TarError, OSError) as error:
            detail = f"the rest of it: {type(error).__name__}: {error}"
            yield RefusedRecord(source=path.name, reason=Reason.UNREADABLE, detail=detail)


def _record(name: str, key: str, parts: dict[str, bytes]) -> CachedSample:
    missing = {"pth", "pickle", "json"} - set(parts)
    if missing:
        found = ", ".join(f".{part}" for part in parts) or "nothing"
        raise RefusedError(Reason.UNREADABLE, f"no .{min(missing)}, found {found}")
    latent = to_latent(load_untrusted(parts["pth"]))
    tensors = {"latent": latent}
    text, about = load_untrusted(parts["pickle"]), parse_json(parts["json"])
    if isinstance(text, dict):
        pooled = text.get("pooled_prompt_embeds", text.get("clip_embeds"))
        text = text.get("prompt_embeds", text.get("t5_embeds"))
        if pooled is not None:
            tensors["pooled_text"] = to_pooled(pooled)
    tensors["text"] = to_text(text)
    # DFM's image_height and image_width are taken from wrong axes, so they are not used.
    height, width = 8 * latent.shape[2], 8 * latent.shape[3]
    known = {"caption": "", "source": name, "height": height, "width": width, "fps": None}
    known |= {"original_height": height, "original_width": width, "num_frames": latent.shape[1]}
    if not isinstance(about, dict):
        raise RefusedError(Reason.UNREADABLE, f".json holds a {type(about).__name__}, no object")
    return CachedSample(
        key=key if re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key) else key_of(name),
        tensors=tensors,
        about=checked_description({k: about.get(k, v) for k, v in known.items()}),
    )
