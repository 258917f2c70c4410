"""The cache of NeMo AutoModel: a file for each sample in `WxH/`, and an index of them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from data_prep.files import WholeFile, write_whole
from data_prep.formats.records import Record, as_latent, as_text, damage_refused, untrusted
from data_prep.refusals import PrepError, RefusedError
from data_prep.splits import key_of

INDEX = "metadata.json"


def write_automodel(
    records: Iterable[Record],
    folder: Path,
    *,
    ending: str,
    shard_size: int,
    model: dict[str, Any],
    text_length: int,
) -> int:
    """Writes the layout of AutoModel into `folder`; returns the number of samples.

    Paths in the index are relative to `folder`, so that it can be moved. Texts are filled up with
    zeros to `text_length`, without which their loader could not stack them.
    """
    shards, rows = list[str](), list[dict[str, Any]]()
    total = 0
    for record in records:
        rows.append(_write_sample(record, folder, ending, model["model_type"], text_length))
        total += 1
        if len(rows) == shard_size:
            shards.append(_write_rows(folder, rows, len(shards)))
            rows = []
    if rows:
        shards.append(_write_rows(folder, rows, len(shards)))
    index = {**model, "total_items": total, "num_shards": len(shards), "shard_size": shard_size}
    write_whole(folder / INDEX, (json.dumps({**index, "shards": shards}, indent=2)).encode())
    return total


def _write_rows(folder: Path, rows: list[dict[str, Any]], number: int) -> str:
    name = f"metadata_shard_{number:04d}.json"
    write_whole(folder / name, json.dumps(rows, indent=1).encode())
    return name


def _write_sample(
    record: Record, folder: Path, ending: str, model: str, text_length: int
) -> dict[str, Any]:
    about, width, height = record.about, record.about["width"], record.about["height"]
    name = f"{width}x{height}/{hashlib.md5(record.key.encode()).hexdigest()}.{ending}"
    row = {
        "cache_file": name,
        "bucket_resolution": [width, height],
        "original_resolution": [about["original_width"], about["original_height"]],
        "num_frames": about["num_frames"],
        "prompt": about["caption"],
        "aspect_ratio": width / height,
        "pixels": width * height,
        "model_type": model,
    }
    (folder / name).parent.mkdir(exist_ok=True)
    file = WholeFile(folder / name)
    try:
        source = {"image_path" if model == "flux" else "video_path": about["source"]}
        tensors = _tensors(record, model, text_length)
        torch.save({**tensors, **row, **source, "fps": about["fps"]}, file.stream)
        file.publish()
    finally:
        file.discard()
    return {**row, **source}


def _tensors(record: Record, model: str, text_length: int) -> dict[str, Any]:
    """As AutoModel names them: images have no axis of frames, all texts one of samples."""
    given = record.tensors
    missing = max(0, text_length - len(given["text"]))
    text_1LE = torch.nn.functional.pad(given["text"], (0, 0, 0, missing))[None]
    if model == "flux":
        found = {"latent": given["latent"][:, 0], "prompt_embeds": text_1LE}
        pooled = given.get("pooled_text")
        return found if pooled is None else {**found, "pooled_prompt_embeds": pooled[None]}
    found = {"video_latents": given["latent"][None], "text_embeddings": text_1LE}
    if "text_2" in given:
        found["text_embeddings_2"] = given["text_2"][None]
    for ours, theirs in (
        ("first_frame_latent", "first_frame_latent"),
        ("image_embed", "image_embeds"),
    ):
        if ours in given:
            found[theirs] = given[ours][None]
    return found


def read_automodel(folder: Path) -> Iterator[Record | RefusedError]:
    """Every sample that the index names.

    Raises:
        PrepError: there is no index.
    """
    try:
        index = json.loads((folder / INDEX).read_bytes())
        names = index.get("shards") or sorted(p.name for p in folder.glob("metadata_shard_*.json"))
        rows = [row for name in names for row in json.loads((folder / name).read_bytes())]
    except (OSError, ValueError) as error:
        raise PrepError(f"{folder} is no cache of AutoModel: {error}") from None
    for number, row in enumerate(rows):
        try:
            with damage_refused(f"{INDEX}, item {number}"):
                path = Path(row["cache_file"])
                # Their own index has absolute paths, which are wrong once the cache is moved.
                local = folder.joinpath(*path.parts[-2:])
                record = _read_sample(local if local.exists() else folder / path, row)
        except RefusedError as refused:
            record = refused
        yield record


def _read_sample(path: Path, row: dict[str, Any]) -> Record:
    source = str(
        row.get("image_path") or row.get("video_path") or Path(path.parent.name, path.name)
    )
    source = Path(source).name if Path(source).is_absolute() else source
    content = untrusted(path)
    latent = as_latent(content.get("video_latents", content.get("latent")), path.name)
    text = as_text(content.get("text_embeddings", content.get("prompt_embeds")), path.name)
    tensors = {"latent": latent, "text": text}
    if content.get("pooled_prompt_embeds") is not None:
        tensors["pooled_text"] = content["pooled_prompt_embeds"].reshape(-1)
    width, height = row["bucket_resolution"]
    before = row.get("original_resolution") or (width, height)
    frames = row.get("num_frames") or 1
    about = {"caption": row.get("prompt", ""), "source": source, "width": width, "height": height}
    about |= {"original_width": before[0], "original_height": before[1], "num_frames": frames}
    name = f"{path.parent.name}/{path.name}"
    return Record(key=key_of(name), tensors=tensors, about={**about, "fps": content.get("fps")})
