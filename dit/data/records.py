"""The layouts of a record, read into tensors: ours and DFM's in shards, AutoModel's in files.

Ours: `.safetensors` (`latent`, `text`, further inputs) and `.json`; DFM's: `.pth` (latent),
`.pickle` (text, for FLUX the pooled text too) and `.json`; AutoModel's: a dict of tensors and
values for each sample. Reading runs no code of the files.
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from dit.batch import TEXT
from dit.data.rejections import Reject, SampleRefused
from dit.models.family import InputKind
from dit.parsing import cause, parse_json

FORMAT_VERSION = 1
LATENT, LOSS_MASK = "latent", "loss_mask"
Kinds = Mapping[str, InputKind]
"""What is read beside the latent: names in the shard, and of which kind they are."""
TEXT_ALONE: Kinds = {TEXT: InputKind.TEXT}
PLACE = "__place__"
"""Part of a record whose `.safetensors` is a Head: the SampleLocation of the whole."""
UNREADABLE = "__unreadable__"
"""Part of a record whose shard cannot be read: the text of the error."""
_ALWAYS = (LATENT, LOSS_MASK)
"""What is read of every record, whatever the family."""
MOST_WEIGHT = 1e6
"""Largest weight of a loss; beyond, squares in float32 are not far from infinite."""
# Types that a sample may have; any other is refused when the whole record is read.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One sample as stored, in tensors."""

    latent_CFHW: Tensor
    inputs: Mapping[str, Tensor]
    """Those that are read and that the sample has, in the shape of their kind."""
    fps: float
    caption: str
    loss_weight: float = 1.0
    loss_mask_1FHW: Tensor | None = None
    unknown: tuple[str, ...] = field(default=(), compare=False)
    """Names of the tensors that the sample has and nothing reads."""

    @property
    def text_LE(self) -> Tensor | None:  # noqa: N802  # names of tensors end in their axes
        return self.inputs.get(TEXT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The beginning of a `.safetensors`, which has the types and shapes of its tensors."""

    data: bytes
    size: int
    """Bytes of the whole file."""


def head_length(payload: bytes | memoryview) -> int:
    """Length of the head in bytes, from the first 8 bytes of a `.safetensors`."""
    return 8 + int.from_bytes(payload[:8], "little")


def is_dfm(parts: Mapping[str, Any]) -> bool:
    return "pth" in parts or "pickle" in parts


def read_record(parts: Mapping[str, Any], kinds: Kinds = TEXT_ALONE) -> ShardRecord:
    """Decodes the parts (extension -> bytes) of one sample.

    Raises:
        SampleRefused: a part is missing, does not match its checksum or cannot be decoded.
    """
    return _read_dfm(parts, kinds) if is_dfm(parts) else _read_ours(parts, kinds)


def read_outline(parts: Mapping[str, Any], kinds: Kinds = TEXT_ALONE) -> ShardRecord:
    """A record of our layout whose `.safetensors` is a Head, with tensors on the device `meta`.

    Raises:
        SampleRefused: the record is damaged, or only the whole record can tell.
    """
    head, about = _part(parts, "safetensors"), _read_json(_part(parts, "json"))
    _check_version(about)
    return _ours(_outlined(head, kinds), about, kinds)


def _read_ours(parts: Mapping[str, Any], kinds: Kinds) -> ShardRecord:
    payload, about = _part(parts, "safetensors"), _read_json(_part(parts, "json"))
    _check_version(about)
    _check_sum(payload, about)
    try:
        tensors = _in_place(payload, kinds) or safetensors.torch.load(bytes(payload))
    except Exception as error:
        raise SampleRefused(Reject.UNDECODABLE, f".safetensors: {cause(error)}") from error
    return _ours(tensors, about, kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """Where a tensor lies in a `.safetensors`."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """Its first byte in the file."""


def _stored(head: Head, kinds: Kinds) -> dict[str, _Stored | None]:
    """All tensors of the file; None for one that nothing reads.

    Raises:
        SampleRefused: the head is damaged, or the file has another length than the head says.
    """
    try:
        tensors, begin = parse_json(str(head.data[8:], "utf-8")), len(head.data)
        notes = tensors.pop("__metadata__", {})
        if not all(isinstance(note, str) for note in notes.values()):
            raise ValueError("__metadata__ is no text")
        _check_end_to_end([t["data_offsets"] for t in tensors.values()], head.size - begin)
        return {
            name: _checked(t, begin) if name in _ALWAYS or name in kinds else None
            for name, t in tensors.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SampleRefused(Reject.UNDECODABLE, f".safetensors: {cause(error)}") from error


def _check_end_to_end(spans: list[list[int]], size: int) -> None:
    """As safetensors requires: each byte belongs to exactly one tensor."""
    if not all(_are_counts(span) for span in spans):
        raise ValueError("data_offsets are no whole numbers")
    starts, stops = zip(*sorted(map(tuple, spans)), strict=True)
    if [*starts, size] != [0, *stops]:
        raise ValueError(f"its tensors do not lie end to end in {size} bytes")


def _checked(tensor: dict[str, Any], begin: int) -> _Stored:
    (start, stop), dtype, shape = tensor["data_offsets"], _DTYPES[tensor["dtype"]], tensor["shape"]
    if not _are_counts(shape) or math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{tensor} is {stop - start} bytes")
    return _Stored(dtype=dtype, shape=shape, start=begin + start)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _outlined(head: Head, kinds: Kinds) -> dict[str, Tensor | None]:
    try:
        return {
            name: t and torch.empty(t.shape, dtype=t.dtype, device="meta")
            for name, t in _stored(head, kinds).items()
        }
    except (TypeError, RuntimeError) as error:
        raise SampleRefused(Reject.UNDECODABLE, f".safetensors: {cause(error)}") from error


def _in_place(
    payload: bytes | memoryview, kinds: Kinds = TEXT_ALONE
) -> dict[str, Tensor | None] | None:
    """The tensors as views of the payload; None where safetensors, which copies, must read it."""
    if isinstance(payload, bytes):
        return None  # torch makes no views of read-only memory
    try:
        head = Head(data=bytes(payload[: head_length(payload)]), size=len(payload))
        stored = _stored(head, kinds)
    except SampleRefused:
        return None
    if any(t is not None and t.start % t.dtype.itemsize for t in stored.values()):
        return None  # torch needs aligned numbers
    return {name: t and _view(payload, t) for name, t in stored.items()}


def _view(payload: bytes | memoryview, t: _Stored) -> Tensor:
    if 0 in t.shape:
        return torch.empty(t.shape, dtype=t.dtype)  # torch makes no views of nothing
    numbers = torch.frombuffer(payload, dtype=t.dtype, count=math.prod(t.shape), offset=t.start)
    return numbers.view(t.shape)


def _ours(tensors: Mapping[str, Tensor | None], about: dict[str, Any], kinds: Kinds) -> ShardRecord:
    if LATENT not in tensors:
        raise SampleRefused(
            Reject.MISSING_PART, f".safetensors holds {sorted(tensors)}, no `latent`"
        )
    inputs, mask = _shaped(tensors, kinds), tensors.get(LOSS_MASK)
    every = len(tensors) == 1 + len(inputs) + (mask is not None)
    return ShardRecord(
        latent_CFHW=_four_axes(tensors[LATENT], what=LATENT),
        inputs=inputs,
        fps=_fps(about),
        caption=str(about.get("caption", "")),
        loss_weight=_loss_weight(about),
        loss_mask_1FHW=None if mask is None else _four_axes(mask, what=LOSS_MASK),
        unknown=() if every else tuple(sorted(tensors.keys() - {*_ALWAYS, *kinds})),
    )


def _shaped(tensors: Mapping[str, Tensor | None], kinds: Kinds) -> dict[str, Tensor]:
    """The tensors that are read and present, in the shape of their kind."""
    return {
        name: _AXES[kind](tensors[name], what=name)
        for name, kind in kinds.items()
        if tensors.get(name) is not None
    }


def _read_dfm(parts: Mapping[str, Any], kinds: Kinds) -> ShardRecord:
    latent, text = _part(parts, "pth"), _part(parts, "pickle")
    about = _read_json(_part(parts, "json"))
    latent_CFHW, found = _unpickled(latent, "pth"), _unpickled(text, "pickle")
    if isinstance(found, dict):  # DFM's scripts for FLUX store the pooled text as well
        pooled = found.get("pooled_prompt_embeds", found.get("clip_embeds"))
        found = {TEXT: found.get("prompt_embeds", found.get("t5_embeds")), "pooled_text": pooled}
    else:
        found = {TEXT: found}
    inputs = _shaped(found, kinds)
    if TEXT in inputs:
        inputs[TEXT] = trim_padding(inputs[TEXT])
    present = {name for name, value in found.items() if value is not None}
    return ShardRecord(
        latent_CFHW=_four_axes(latent_CFHW, what=LATENT),
        inputs=inputs,
        fps=_fps(about),
        caption=str(about.get("caption", "")),
        loss_weight=_loss_weight(about),
        unknown=tuple(sorted(present - kinds.keys())),
    )


def read_automodel(
    content: dict[str, Any], kinds: Kinds = TEXT_ALONE, *, whole: bool = True
) -> ShardRecord:
    """Content of a file in a cache of AutoModel; unless `whole`, its texts keep their padding.

    Raises:
        SampleRefused: a tensor is missing or has another form.
    """
    found = {ours: content.get(theirs) for ours, theirs in _AUTOMODEL.items()}
    found[TEXT] = content.get("text_embeddings", content.get("prompt_embeds"))
    is_video = content.get("video_latents") is not None
    latent = content["video_latents"] if is_video else content.get(LATENT)
    inputs = _shaped(found, kinds)
    if whole and is_video:
        for name, mask in ((TEXT, "text_mask"), ("text_2", "text_mask_2")):
            if name in inputs:
                inputs[name] = _unmasked(inputs[name], content.get(mask), what=mask)
    return ShardRecord(
        latent_CFHW=_four_axes(latent, what=LATENT),
        inputs=inputs,
        fps=_fps(content),
        caption=str(content.get("prompt", "")),
    )


_AUTOMODEL = {
    "pooled_text": "pooled_prompt_embeds",
    "text_2": "text_embeddings_2",
    "image_embed": "image_embeds",
    "first_frame_latent": "first_frame_latent",
    "condition_latent": "condition_latent",
}
"""Our names of tensors, and those of AutoModel's caches."""


def _unmasked(text_LE: Tensor, mask: Any, *, what: str) -> Tensor:
    """The rows at which a mask is not 0; without a mask, those before the zero vectors."""
    if mask is None:
        return trim_padding(text_LE)
    if not isinstance(mask, Tensor) or mask.numel() != len(text_LE):
        shown = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SampleRefused(
            Reject.UNDECODABLE, f"{what} {shown} is no mask of a text with {len(text_LE)} rows"
        )
    return text_LE[mask.flatten().bool()]


def _unpickled(part: Any, name: str) -> Any:
    """The object that `torch.save` or pickle wrote."""
    from dit import safe_pickle  # only records of DFM need it

    try:
        return safe_pickle.loads(bytes(part))
    except pickle.UnpicklingError as error:
        raise SampleRefused(Reject.UNDECODABLE, f".{name}: {error}") from error


def trim_padding(text_LE: Tensor) -> Tensor:
    """The text without the zero vectors at its end; at least one vector stays."""
    used = text_LE.any(dim=1).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    return text_LE[:length]


def _part(parts: Mapping[str, Any], name: str) -> Any:
    if name not in parts:
        found = ", ".join(f".{part}" for part in parts if not part.startswith("__")) or "nothing"
        raise SampleRefused(Reject.MISSING_PART, f"no .{name}, found {found}")
    return parts[name]


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        about = parse_json(data)
    except ValueError as error:
        raise SampleRefused(Reject.UNDECODABLE, f".json: {error}") from error
    if not isinstance(about, dict):
        raise SampleRefused(
            Reject.UNDECODABLE, f".json holds a {type(about).__name__}, not an object"
        )
    return about


def _check_version(about: dict[str, Any]) -> None:
    version = about.get("format_version", FORMAT_VERSION)
    if version == FORMAT_VERSION:
        return
    known = f"format_version={version!r}, this program reads {FORMAT_VERSION}"
    if type(version) is int and version > FORMAT_VERSION:
        raise SampleRefused(Reject.NEWER, f"{known}: the program is older than the shard")
    raise SampleRefused(Reject.UNDECODABLE, f"{known}: no program has written such a version")


def _check_sum(payload: bytes | memoryview, about: dict[str, Any]) -> None:
    sums = about.get("crc32")
    if not isinstance(sums, dict) or "safetensors" not in sums:
        return  # others may write none
    stored, found = str(sums["safetensors"]), f"{zlib.crc32(payload):08x}"
    if stored.lower() != found:
        raise SampleRefused(Reject.CHECKSUM, f".safetensors has crc32 {found}, .json says {stored}")


def _four_axes(latent: Any, *, what: str) -> Tensor:
    """[C, F, H, W] from [1, C, F, H, W], [C, F, H, W] or [C, H, W]."""
    latent = _as_floats(latent, what=what)
    if latent.dim() == 5 and latent.shape[0] == 1:
        latent = latent[0]
    elif latent.dim() == 3:
        latent = latent[:, None]
    if latent.dim() != 4 or latent.numel() == 0:
        raise SampleRefused(
            Reject.UNDECODABLE, f"{what} has shape {list(latent.shape)}, not [C, F, H, W]"
        )
    return latent


def _two_axes(text: Any, *, what: str) -> Tensor:
    """[L, E] from [1, L, E] or [L, E]."""
    text = _as_floats(text, what=what)
    if text.dim() == 3 and text.shape[0] == 1:
        text = text[0]
    if text.dim() != 2:
        raise SampleRefused(Reject.UNDECODABLE, f"{what} has shape {list(text.shape)}, not [L, E]")
    return text


def _one_axis(vector: Any, *, what: str) -> Tensor:
    """[E] from [1, E] or [E]."""
    vector = _as_floats(vector, what=what)
    if vector.dim() == 2 and vector.shape[0] == 1:
        vector = vector[0]
    if vector.dim() != 1:
        raise SampleRefused(Reject.UNDECODABLE, f"{what} has shape {list(vector.shape)}, not [E]")
    return vector


_AXES = {
    InputKind.TEXT: _two_axes,
    InputKind.NULL_TEXT: _two_axes,
    InputKind.VECTOR: _one_axis,
    InputKind.CHANNELS: _four_axes,
    InputKind.FRAME_CHANNELS: _four_axes,
    InputKind.FRAMES: _four_axes,
    InputKind.REFERENCE: _four_axes,
}


def _as_floats(value: Any, *, what: str) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dtype not in _DTYPES.values():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise SampleRefused(Reject.UNDECODABLE, f"{what} is {kind}, not a tensor of floats")
    return value


def _fps(about: dict[str, Any]) -> float:
    """Frames per second, NaN for none."""
    fps = about.get("fps")
    if fps is None:
        return math.nan
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise SampleRefused(Reject.UNDECODABLE, f".json: fps={fps!r} is not a positive number")
    return float(fps)


def _loss_weight(about: dict[str, Any]) -> float:
    """What multiplies the loss of the sample; 1 where nothing is said."""
    weight = about.get("loss_weight")
    if weight is None:
        return 1.0
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= MOST_WEIGHT:
        raise SampleRefused(
            Reject.LOSS_WEIGHT,
            f".json: loss_weight={weight!r} is no number from 0 to {MOST_WEIGHT:g}",
        )
    return float(weight)
