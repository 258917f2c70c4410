"""The cache of NeMo AutoModel: a file for each sample in `WxH/`, and an index of all samples."""

# C latent channels, F frames, H rows, W columns, L text tokens, E text width

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
    numbers,
    padded,
    read_or_refuse,
    to_text,
)
from data_prep.planning.splits import key_of
from data_prep.refusals import PrepError, Reason, RefusedError, printable
from dit.safe_writing import AtomicFile, write_atomically
from dit.stored_samples import (
    AUTOMODEL,
    INDEX,
    UnusableError,
    automodel_file,
    automodel_files,
    automodel_rows,
    automodel_sizes,
    automodel_tensors,
    read_json,
    unmasked,
)
from dit.system_errors import explained

# AutoModel's readers of pictures and of videos expect different keys. Samples of these codecs with
# one frame are written for the reader of pictures.
_OF_PICTURES = ("flux", "pixel")
_OF_IMAGES = ("first_frame_latent", "condition_latent", "image_embed")
"""Tensors of a video sample that image-to-video models read; AutoModel reads only `image_embed`."""
_GLYPHS = 256  # tokens to which the pipeline of HunyuanVideo pads its second text


def write_automodel(
    records: Iterable[CachedSample],
    folder: Path,
    *,
    ending: str,
    shard_size: int,
    model: dict[str, Any],
    text_length: int,
) -> int:
    """Writes samples as a cache of AutoModel into `folder`, and returns their number.

    `ending` is meta or pt. `model` has the entries of the index that name the model. Each index
    file lists `shard_size` samples, the last one maybe fewer. Texts are padded with zeros to
    `text_length` rows, so that AutoModel's loader can stack them.

    Paths in the index are absolute, because AutoModel's reader expects that; `relocate` corrects
    them after the folder was moved.
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
    """The entry of a sample in AutoModel's index.

    Adds the sample's size to `buckets` (`WxH` -> number) if it is new.
    """
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
    """Names of the tensors of `record` that a file of AutoModel's cache for `model` can hold."""
    if _is_picture(record, model):
        return {"latent", "text", "pooled_text"}
    return {"latent", "text", "text_2", *_OF_IMAGES}


def _write_sample(record: CachedSample, row: dict[str, Any], text_length: int) -> None:
    path = Path(row["cache_file"])
    path.parent.mkdir(exist_ok=True)
    named = _pictures if _is_picture(record, row["model_type"]) else _videos
    about = {key: value for key, value in row.items() if key != "cache_file"}
    content = {**named(record.tensors, text_length), **about, "fps": record.about["fps"]}
    with AtomicFile(path) as file:
        torch.save(content, file.stream)


def _pictures(given: dict[str, Tensor], text_length: int) -> dict[str, Any]:
    """Tensors of an image under AutoModel's names: a latent [C, H, W], texts with a batch axis.

    `given` has the names of our shards: `latent` [C, 1, H, W], `text` [L, E], `pooled_text` [E].
    """
    # The offset of the crop is not stored in our shards; 0 is that of an uncropped picture.
    found = {"latent": given["latent"][:, 0].clone(), "crop_offset": [0, 0]}
    found["prompt_embeds"] = _filled(given["text"], text_length)
    if "pooled_text" in given:
        found["pooled_prompt_embeds"] = given["pooled_text"][None]
    return found


def _videos(given: dict[str, Tensor], text_length: int) -> dict[str, Any]:
    """Tensors of a video under AutoModel's names, each with a batch axis.

    `given` has the names of our shards: `latent` [C, F, H, W], `text` [L, E], and maybe `text_2`
    [L, E] of the glyph encoder of HunyuanVideo 1.5 and the tensors in `_OF_IMAGES`.
    """
    found = {"video_latents": given["latent"][None]}
    found["text_embeddings"] = _filled(given["text"], text_length)
    if "text_2" in given:
        found["text_mask"] = _mask(given["text"], text_length)
        found["text_embeddings_2"] = _filled(given["text_2"], _GLYPHS)
        found["text_mask_2"] = _mask(given["text_2"], _GLYPHS)
    found |= {AUTOMODEL[name]: given[name][None] for name in _OF_IMAGES if name in given}
    return found


def _filled(text_LE: Tensor, length: int) -> Tensor:
    return padded(text_LE, length)[None]


def _mask(text_LE: Tensor, length: int) -> Tensor:
    """A mask [1, length] that is 1 for the rows of `text_LE` and 0 for padding."""
    return pad(torch.ones(len(text_LE), dtype=torch.long), (0, max(0, length - len(text_LE))))[None]


def relocate(folder: Path) -> int:
    """Corrects the paths in the index of a moved AutoModel cache; returns the number of samples.

    Raises:
        PrepError: the index is damaged, or a file that it names is missing. Nothing is written
            then.
    """
    shards, folder = dict[str, list[dict[str, Any]]](), folder.resolve()
    for name in _shards(folder):
        try:
            rows = automodel_rows(folder / name)
            shards[name] = [row | {"cache_file": str(_local(folder, row))} for row in rows]
        except (OSError, ValueError) as error:
            raise PrepError(
                f"{folder / name} cannot be corrected: {printable(explained(error))}; nothing was"
                " changed"
            ) from None
    for name, rows in shards.items():
        write_atomically(folder / name, json.dumps(rows, indent=1).encode())
    return sum(map(len, shards.values()))


def read_automodel(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Yields each sample that the index of the AutoModel cache in `folder` lists, or its refusal.

    Raises:
        PrepError: there is no index that can be read.
    """
    return _read(folder, _shards(folder))


def index_of(folder: Path) -> Any:
    """The parsed JSON of the index of the AutoModel cache in `folder`; its type is not checked.

    Raises:
        PrepError: the index cannot be read.
    """
    try:
        return read_json(folder / INDEX)
    except (OSError, ValueError) as error:
        raise PrepError(
            f"{folder / INDEX} cannot be read: {explained(error)}; copy it from the cache again"
        ) from None


def _shards(folder: Path) -> list[str]:
    """Names of the files that AutoModel's index in `folder` lists.

    Raises:
        PrepError: the index cannot be read, or is not one of AutoModel.
    """
    try:
        return automodel_files(folder, index_of(folder))
    except UnusableError as error:
        raise PrepError(
            f"{folder / INDEX} is not an index of AutoModel: {error}; give a folder that AutoModel"
            " wrote"
        ) from None


def _read(folder: Path, names: list[str]) -> Iterator[CachedSample | RefusedRecord]:
    for name in names:
        try:
            rows = automodel_rows(folder / name)
        except (OSError, ValueError) as error:
            detail = printable(explained(error))
            yield RefusedRecord(source=name, reason=Reason.UNREADABLE, detail=detail)
            continue
        for number, row in enumerate(rows):
            yield read_or_refuse(_source(name, number, row), partial(_record, folder, row))


def _source(name: str, number: int, row: Any) -> str:
    """How a refusal names a sample: the last two parts of its file's path, such as `WxH/hash.meta`.

    If the index has no path, it is the sample's `number` in the index file `name`.
    """
    file = row.get("cache_file") if isinstance(row, dict) else None
    return "/".join(Path(file).parts[-2:]) if isinstance(file, str) else f"{name}, item {number}"


def _local(folder: Path, row: Any) -> Path:
    """The path of the sample's file in `folder`, which may have been moved.

    Raises:
        UnusableError: the file does not exist, or the path leaves the cache.
    """
    path = automodel_file(folder, row)
    if path is None:
        raise UnusableError(
            f"{row['cache_file']:.300} does not exist; copy it from the cache again"
        )
    return path


def _record(folder: Path, row: Any) -> CachedSample:
    path = _local(folder, row)
    source = row.get("image_path") or row.get("video_path") or f"{path.parent.name}/{path.name}"
    content = load_untrusted(path)
    if not isinstance(content, dict):
        raise RefusedError(
            Reason.UNREADABLE,
            f"the file holds a {type(content).__name__}, not a dict of tensors; write it again",
        )
    tensors = _tensors(content)
    model = str(content.get("model_type") or row.get("model_type"))
    if model.startswith("hunyuan") and "image_embed" in tensors:
        # AutoModel shows its network the first frame of the latent: the codec is causal.
        tensors.setdefault("first_frame_latent", tensors["latent"][:, :1].clone())
    about = _about(row, content)
    about["source"] = Path(source).name if Path(source).is_absolute() else source
    key = key_of(f"{path.parent.name}/{path.name}")
    return CachedSample(key=key, tensors=tensors, about=checked_description(about))


def _tensors(content: dict[str, Any]) -> dict[str, Tensor]:
    given = automodel_tensors(content)
    found = {"latent": numbers(given["latent"], "CFHW", what="latent")}
    found["text"] = _text(given["text"], content)
    if given["text_2"] is not None:  # all of its rows may be padding
        rows, mask = numbers(given["text_2"], "LE", what="text"), content.get("text_mask_2")
        found["text_2"] = unmasked(rows, mask, what="text_mask_2")
    if given["pooled_text"] is not None:
        found["pooled_text"] = numbers(given["pooled_text"], "E", what="pooled text")
    for name in _OF_IMAGES:
        if given[name] is not None:
            axes = "LE" if name == "image_embed" else "CFHW"
            found[name] = numbers(given[name], axes, what=AUTOMODEL[name])
    return found


def _text(value: Any, content: dict[str, Any]) -> Tensor:
    """The text embeddings [L, E] in `value`, without padding rows.

    Padding rows are those that `text_mask` in `content` excludes or, if there is no such mask, the
    rows of zeros at the end.

    Raises:
        UnusableError: `value` or the mask has wrong axes.
        RefusedError: `text_mask` excludes all rows, or `numbers` refuses the tensor.
    """
    if content.get("text_mask") is None:
        return to_text(value)
    rows_LE = numbers(value, "LE", what="text")
    text_LE = unmasked(rows_LE, content["text_mask"], what="text_mask")
    if not len(text_LE):
        raise RefusedError(
            Reason.UNREADABLE, "text_mask is 0 in all rows of the text; write the file again"
        )
    return text_LE


def _about(row: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    (width, height), (original_width, original_height) = automodel_sizes(row)
    return {
        "caption": row.get("prompt", ""),
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
        "num_frames": row.get("num_frames") or 1,
        "fps": content.get("fps"),
    }
