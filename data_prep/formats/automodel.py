"""The cache of NeMo AutoModel: a file for each sample in `WxH/`, and an index of all samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    checked_description,
    load_untrusted,
    padded,
    read_cache_file,
    read_or_refuse,
    to_latent,
    to_pooled,
    to_rows,
    to_text,
)
from data_prep.planning.splits import key_of
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.parsing import parse_json
from dit.safe_writing import AtomicFile, write_atomically

INDEX = "metadata.json"
# AutoModel's readers of pictures and of videos expect different keys. Samples of these codecs with
# one frame are written for the reader of pictures.
_OF_PICTURES = ("flux", "pixel")
_OF_IMAGES = {
    "first_frame_latent": "first_frame_latent",
    "condition_latent": "condition_latent",
    "image_embed": "image_embeds",
}
"""What image-to-video models read: our name and that in the file. AutoModel reads the last."""
_GLYPHS = 256  # tokens of HunyuanVideo's second text, as its pipeline pads them


def write_automodel(
    records: Iterable[CachedSample],
    folder: Path,
    *,
    ending: str,
    shard_size: int,
    model: dict[str, Any],
    text_length: int,
) -> int:
    """Writes the layout of AutoModel into `folder`; returns the number of samples.

    Paths in the index are absolute, because AutoModel's reader expects that; `relocate` corrects
    them after the folder was moved. Texts are padded with zeros to `text_length`, so that its
    loader can stack them.
    """
    shards, rows, buckets = list[str](), list[dict[str, Any]](), dict[str, int]()
    folder, total = folder.resolve(), 0
    for record in records:
        row = _row(record, folder, ending, model["model_type"], buckets)
        _write_sample(record, row, text_length)
        rows.append(row)
        total += 1
        if len(rows) == shard_size:
            shards.append(_write_rows(folder, rows, len(shards)))
            rows = []
    if rows:
        shards.append(_write_rows(folder, rows, len(shards)))
    index = {**model, "total_items": total, "num_shards": len(shards), "shard_size": shard_size}
    write_atomically(folder / INDEX, (json.dumps({**index, "shards": shards}, indent=2)).encode())
    return total


def _write_rows(folder: Path, rows: list[dict[str, Any]], number: int) -> str:
    name = f"metadata_shard_{number:04d}.json"
    write_atomically(folder / name, json.dumps(rows, indent=1).encode())
    return name


def _row(
    record: CachedSample, folder: Path, ending: str, model: str, buckets: dict[str, int]
) -> dict[str, Any]:
    """The entry of a sample in the index; buckets are numbered in the order of their samples."""
    about, width, height = record.about, record.about["width"], record.about["height"]
    bucket = f"{width}x{height}"
    file = folder / bucket / f"{hashlib.md5(record.key.encode()).hexdigest()}.{ending}"
    return {
        "cache_file": str(file),
        "bucket_resolution": [width, height],
        "bucket_id": buckets.setdefault(bucket, len(buckets)),
        "original_resolution": [about["original_width"], about["original_height"]],
        "num_frames": about["num_frames"],
        "prompt": about["caption"],
        "aspect_ratio": width / height,
        "pixels": width * height,
        "model_type": model,
        "image_path" if _is_picture(record, model) else "video_path": about["source"],
    }


def _is_picture(record: CachedSample, model: str) -> bool:
    return model in _OF_PICTURES and record.tensors["latent"].shape[1] == 1


def held_by(record: CachedSample, *, model: str) -> set[str]:
    """Tensors of a sample that its file has a place for."""
    if _is_picture(record, model):
        return {"latent", "text", "pooled_text"}
    return {"latent", "text", "text_2", *_OF_IMAGES}


def _write_sample(record: CachedSample, row: dict[str, Any], text_length: int) -> None:
    path = Path(row["cache_file"])
    path.parent.mkdir(exist_ok=True)
    named = _pictures if _is_picture(record, row["model_type"]) else _videos
    about = {key: value for key, value in row.items() if key != "cache_file"}
    file = AtomicFile(path)
    try:
        torch.save(
            {**named(record.tensors, text_length), **about, "fps": record.about["fps"]}, file.stream
        )
        file.publish()
    finally:
        file.discard()


def _pictures(given: dict[str, Tensor], text_length: int) -> dict[str, Any]:
    """Tensors as AutoModel names them: a latent without frame axis, texts with a batch axis."""
    # The offset of the crop is not stored in our shards; 0 is that of an uncropped picture.
    found = {"latent": given["latent"][:, 0].clone(), "crop_offset": [0, 0]}
    found["prompt_embeds"] = _filled(given["text"], text_length)
    if "pooled_text" in given:
        found["pooled_prompt_embeds"] = given["pooled_text"][None]
    return found


def _videos(given: dict[str, Tensor], text_length: int) -> dict[str, Any]:
    found = {"video_latents": given["latent"][None]}
    found["text_embeddings"] = _filled(given["text"], text_length)
    if "text_2" in given:
        found["text_mask"] = _mask(given["text"], text_length)
        found["text_embeddings_2"] = _filled(given["text_2"], _GLYPHS)
        found["text_mask_2"] = _mask(given["text_2"], _GLYPHS)
    for ours, theirs in _OF_IMAGES.items():
        if ours in given:
            found[theirs] = given[ours][None]
    return found


def _filled(text_LE: Tensor, length: int) -> Tensor:
    """[1, length, E]."""
    return padded(text_LE, length)[None]


def _mask(text_LE: Tensor, length: int) -> Tensor:
    """[1, length], 1 for tokens and 0 for padding."""
    return pad(torch.ones(len(text_LE), dtype=torch.long), (0, max(0, length - len(text_LE))))[None]


def relocate(folder: Path) -> int:
    """Writes the present paths of the files into the index; returns the number of samples.

    Raises:
        PrepError: the index is damaged, or a file that it names is not there. Nothing is written.
    """
    shards, folder = dict[str, list[dict[str, Any]]](), folder.resolve()
    for name in _shards(folder):
        try:
            rows = _rows(folder / name)
            shards[name] = [
                {**_object(row), "cache_file": str(_local(folder, row))} for row in rows
            ]
        except RefusedError as refused:
            raise PrepError(f"{folder / name}: {refused.detail}") from None
    for name, rows in shards.items():
        write_atomically(folder / name, json.dumps(rows, indent=1).encode())
    return sum(map(len, shards.values()))


def read_automodel(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Every sample in the index.

    Raises:
        PrepError: there is no index that can be read.
    """
    return _read(folder, _shards(folder))


def index_of(folder: Path) -> Any:
    """The content of the index of a cache, which is an object if nobody has changed it.

    Raises:
        PrepError: it cannot be read.
    """
    path = folder / INDEX
    try:
        return parse_json(read_cache_file(path))
    except RefusedError as refused:
        raise PrepError(f"{path} cannot be read: {refused.detail}; restore it") from None
    except (OSError, ValueError) as error:
        raise PrepError(f"{path} cannot be read: {error}; restore it from the cache") from None


def _shards(folder: Path) -> list[str]:
    """Names of the files of the index."""
    path, index = folder / INDEX, index_of(folder)
    names = index.get("shards") if isinstance(index, dict) else None
    if isinstance(index, dict) and names is None:
        names = sorted(path.name for path in folder.glob("metadata_shard_*.json"))
    if not isinstance(names, list) or not all(map(_is_name, names)):
        raise PrepError(
            f"{path} is no index of AutoModel: 'shards' must be a list of names of files beside it"
        )
    return names


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name and Path(name).name == name


def _read(folder: Path, names: list[str]) -> Iterator[CachedSample | RefusedRecord]:
    for name in names:
        try:
            rows = _rows(folder / name)
        except RefusedError as refused:
            yield RefusedRecord(source=name, reason=refused.reason, detail=refused.detail)
            continue
        for number, row in enumerate(rows):
            yield read_or_refuse(_source(name, number, row), partial(_record, folder, row))


def _rows(path: Path) -> list[Any]:
    try:
        rows = parse_json(read_cache_file(path))
    except (OSError, ValueError) as error:
        raise RefusedError(Reason.UNREADABLE, f"{error}") from error
    if not isinstance(rows, list):
        raise RefusedError(Reason.UNREADABLE, f"holds a {type(rows).__name__}, no list of samples")
    return rows


def _source(name: str, number: int, row: Any) -> str:
    """The name of a sample in a refusal: its file, if the index has one."""
    file = row.get("cache_file") if isinstance(row, dict) else None
    return "/".join(Path(file).parts[-2:]) if isinstance(file, str) else f"{name}, item {number}"


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RefusedError(Reason.UNREADABLE, f"the index holds a {type(row).__name__}, no object")
    return row


def _local(folder: Path, row: Any) -> Path:
    """The present path of a sample's file: the cache may have been moved.

    Raises:
        RefusedError: it is not there, or the path leaves the cache.
    """
    named = _object(row).get("cache_file")
    if not isinstance(named, str) or "\0" in named or ".." in Path(named).parts or not named:
        raise RefusedError(Reason.UNREADABLE, f"cache_file={named!r:.100} is no path of a file")
    path = Path(named)
    inside = path if path.is_relative_to(folder) else folder / path.name
    for candidate in (folder.joinpath(*path.parts[-2:]), inside):
        try:
            if candidate.is_relative_to(folder) and candidate.is_file():
                return candidate
        except OSError:  # a name longer than the file system takes
            continue
    raise RefusedError(Reason.UNREADABLE, f"{named:.300} is not there")


def _record(folder: Path, row: Any) -> CachedSample:
    path = _local(folder, row)
    source = row.get("image_path") or row.get("video_path") or f"{path.parent.name}/{path.name}"
    content = load_untrusted(path)
    if not isinstance(content, dict):
        raise RefusedError(Reason.UNREADABLE, f"the file holds a {type(content).__name__}, no dict")
    tensors = {
        "latent": to_latent(content.get("video_latents", content.get("latent"))),
        **_texts(content),
    }
    if content.get("pooled_prompt_embeds") is not None:
        tensors["pooled_text"] = to_pooled(content["pooled_prompt_embeds"])
    tensors |= _of_images(content)
    model = str(content.get("model_type") or row.get("model_type"))
    if model.startswith("hunyuan") and "image_embed" in tensors:
        # AutoModel shows its network the first frame of the latent: the codec is causal.
        tensors.setdefault("first_frame_latent", tensors["latent"][:, :1].clone())
    about = _about(row, content)
    about["source"] = Path(source).name if Path(source).is_absolute() else source
    key = key_of(f"{path.parent.name}/{path.name}")
    return CachedSample(key=key, tensors=tensors, about=checked_description(about))


def _texts(content: dict[str, Any]) -> dict[str, Tensor]:
    """Both texts, without the rows that their masks leave out; a second one may have none."""
    main = content.get("text_embeddings", content.get("prompt_embeds"))
    if content.get("text_mask") is None:
        found = {"text": to_text(main)}
    else:
        found = {"text": _unmasked(main, content["text_mask"], what="text_mask")}
        if not len(found["text"]):
            raise RefusedError(Reason.UNREADABLE, "text_mask leaves no row of the text")
    if content.get("text_embeddings_2") is not None:
        second, mask = content["text_embeddings_2"], content.get("text_mask_2")
        found["text_2"] = _unmasked(second, mask, what="text_mask_2")
    return found


def _unmasked(value: Any, mask: Any, *, what: str) -> Tensor:
    """The rows [L, E] at which a mask is not 0: encoders make numbers of padding, too.

    Raises:
        RefusedError: there is no mask of so many rows.
    """
    rows = to_rows(value, what="text")
    if not isinstance(mask, Tensor) or mask.numel() != len(rows):
        shown = list(mask.shape) if isinstance(mask, Tensor) else f"{mask!r:.100}"
        raise RefusedError(
            Reason.UNREADABLE, f"{what} {shown} is no mask of a text with {len(rows)} rows"
        )
    return rows[mask.flatten().bool()]


def _of_images(content: dict[str, Any]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for ours, theirs in _OF_IMAGES.items():
        value = content.get(theirs)
        if value is not None:
            is_rows = ours == "image_embed"
            found[ours] = to_rows(value, what=theirs) if is_rows else to_latent(value, what=theirs)
    return found


def _about(row: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    width, height = _resolution(row, "bucket_resolution", "crop_resolution")
    before = row.get("original_resolution") and _resolution(row, "original_resolution")
    original_width, original_height = before or (width, height)
    return {
        "caption": row.get("prompt", ""),
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
        "num_frames": row.get("num_frames") or 1,
        "fps": content.get("fps"),
    }


def _resolution(row: dict[str, Any], *names: str) -> tuple[Any, Any]:
    name = next((name for name in names if name in row), names[0])
    value = row.get(name)
    if not isinstance(value, list) or len(value) != 2:
        raise RefusedError(Reason.UNREADABLE, f"{name}={value!r:.100} is not [width, height]")
    return value[0], value[1]
