"""Reads the records of shards, in three forms, into tensors: this project's, DFM's and MLPerf's.

This project's: `.safetensors` (`latent`, `text`, further inputs) and `.json`; DFM's: `.pth`
(latent), `.pickle` (text, for FLUX the pooled text too) and `.json`; MLPerf's: a bfloat16 part for
each tensor, and `.json`. Reading never runs code from a file.
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dit.batch import SOUND, TEXT
from dit.data.rejections import Reject, SampleRefused
from dit.models.family import InputKind
from dit.parsing import cause, parse_json
from dit.stored_samples import (
    MLPERF,
    RecordHeader,
    UnusableError,
    dfm_texts,
    is_mlperf,
    level_index,
    mlperf_tensors,
    trim_padding,
    with_axes,
)

FORMAT_VERSION = 1
LATENT, LOSS_MASK, LATENT_LOGVAR = "latent", "loss_mask", "latent_logvar"
Kinds = Mapping[str, InputKind]
"""Name in the shard -> kind, for inputs that are read besides the latent."""
TEXT_ALONE: Kinds = {TEXT: InputKind.TEXT}
PLACE = "__place__"
"""Key of a record with a RecordHeader, for the SampleLocation of the whole record."""
UNREADABLE = "__unreadable__"
"""Key of a record that cannot be read, for the text of the error."""
SOUND_PART = "sound.safetensors"
"""Part of a record with the latent [K, A] of its sound; its `.json` describes the sound."""
_ALWAYS = (LATENT, LOSS_MASK, LATENT_LOGVAR)
"""Tensors that are read from every record, whatever the family."""
MOST_WEIGHT = 1e6
"""Largest loss weight; beyond it, squares in float32 come close to infinity."""
# Types that a sample may have; any other is refused when the whole record is read.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A sample as a shard stores it: latent, inputs, caption, frame rate, loss weights."""

    latent_CFHW: Tensor
    inputs: Mapping[str, Tensor]
    """Inputs that the family reads and the sample has, each in the shape of its kind."""
    fps: float
    caption: str
    loss_weight: float = 1.0
    loss_mask_1FHW: Tensor | None = None
    latent_logvar_CFHW: Tensor | None = None
    level_index: int | None = None
    sound_seconds: float | None = None
    """Seconds of sound, without the silence that fills its last latent frame; None: unknown."""
    unknown: tuple[str, ...] = field(default=(), compare=False)
    """Names of tensors in the sample that the family does not read."""

    @property
    def text_LE(self) -> Tensor | None:  # noqa: N802  # names of tensors end in their axes
        return self.inputs.get(TEXT)


def head_length(payload: bytes | memoryview) -> int:
    """Length in bytes of the head of a `.safetensors`, from its first 8 bytes."""
    return 8 + int.from_bytes(payload[:8], "little")


def is_dfm(parts: Mapping[str, Any]) -> bool:
    return "pth" in parts or "pickle" in parts


def has_outline(parts: Mapping[str, Any]) -> bool:
    """Whether `read_outline` can read the record: it is not DFM's, and it has tensors."""
    return is_mlperf(parts) or ("safetensors" in parts and not is_dfm(parts))


def read_record(parts: Mapping[str, Any], kinds: Kinds = TEXT_ALONE) -> ShardRecord:
    """Decodes the parts (extension -> bytes) of one sample, with the inputs of `kinds`.

    Tensors may be views of the parts.

    Raises:
        SampleRefused: a part is missing, does not match its checksum or cannot be decoded.
    """
    if is_mlperf(parts):
        return _read_mlperf(parts, kinds)
    return _read_dfm(parts, kinds) if is_dfm(parts) else _read_ours(parts, kinds)


def read_outline(parts: Mapping[str, Any], kinds: Kinds = TEXT_ALONE) -> ShardRecord:
    """A record in this project's or MLPerf's form as shapes only: its tensors are on `meta`.

    MLPerf's parts that are not RecordHeaders are decoded.

    Raises:
        SampleRefused: the record is damaged, or only the whole record determines its size.
    """
    if is_mlperf(parts):
        return _read_mlperf(parts, kinds)
    payload, about = _part(parts, "safetensors"), _read_json(_part(parts, "json"))
    _check_version(about)
    head = payload if isinstance(payload, RecordHeader) else _header_of(payload)
    tensors = _outlined(head, kinds)
    if (sound := _sound_of(parts, kinds)) is not None:
        head = sound if isinstance(sound, RecordHeader) else _header_of(sound)
        tensors = _with_sound(tensors, _outlined(head, TEXT_ALONE))
    return _ours(tensors, about, kinds)


def _header_of(payload: bytes | memoryview) -> RecordHeader:
    return RecordHeader(data=bytes(payload[: head_length(payload)]), size=len(payload))


def _read_ours(parts: Mapping[str, Any], kinds: Kinds) -> ShardRecord:
    payload, about = _part(parts, "safetensors"), _read_json(_part(parts, "json"))
    _check_version(about)
    tensors = _decoded(payload, "safetensors", about, kinds)
    if (sound := _sound_of(parts, kinds)) is not None:
        tensors = _with_sound(tensors, _decoded(sound, SOUND_PART, about, TEXT_ALONE))
    return _ours(tensors, about, kinds)


def _decoded(
    payload: bytes | memoryview, part: str, about: dict[str, Any], kinds: Kinds
) -> Mapping[str, Tensor | None]:
    _check_sum(payload, part, about)
    try:
        return _in_place(payload, kinds) or safetensors.torch.load(bytes(payload))
    except Exception as error:
        raise SampleRefused(Reject.UNDECODABLE, f".{part}: {cause(error)}") from error


def _sound_of(parts: Mapping[str, Any], kinds: Kinds) -> Any:
    """The part with the sound of a record; None if it has none or the family reads no sound."""
    return parts.get(SOUND_PART) if SOUND in kinds else None


def _with_sound(
    tensors: Mapping[str, Tensor | None], of_sound: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    if LATENT not in of_sound:
        raise SampleRefused(
            Reject.MISSING_PART, f".{SOUND_PART} holds {sorted(of_sound)}, but no `latent`"
        )
    return {**tensors, SOUND: of_sound[LATENT]}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """Dtype, shape and position of a tensor in a `.safetensors`."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """First byte of the tensor's numbers in the file."""


def _stored(head: RecordHeader, kinds: Kinds) -> dict[str, _Stored | None]:
    """Name -> position of each tensor in a `.safetensors`; None if the tensor is not read.

    Raises:
        SampleRefused: the head is damaged, or states another length than the file has.
    """
    try:
        tensors, begin = parse_json(str(head.data[8:], "utf-8")), len(head.data)
        notes = tensors.pop("__metadata__", {})
        if not all(isinstance(note, str) for note in notes.values()):
            raise ValueError("the entries of __metadata__ in its head are not all text")
        _check_end_to_end([t["data_offsets"] for t in tensors.values()], head.size - begin)
        return {
            name: _checked(t, begin) if name in _ALWAYS or name in kinds else None
            for name, t in tensors.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SampleRefused(Reject.UNDECODABLE, f".safetensors: {cause(error)}") from error


def _check_end_to_end(spans: list[list[int]], size: int) -> None:
    """Raises ValueError unless each byte belongs to exactly one tensor, as safetensors requires."""
    if not all(_are_counts(span) for span in spans):
        raise ValueError(
            f"the data_offsets in its head are {spans!s:.100}, not pairs of whole numbers"
        )
    starts, stops = zip(*sorted(map(tuple, spans)), strict=True)
    if [*starts, size] != [0, *stops]:
        raise ValueError(
            f"by their data_offsets, its tensors do not fill its {size} bytes of numbers end to end"
        )


def _checked(tensor: dict[str, Any], begin: int) -> _Stored:
    (start, stop), dtype, shape = tensor["data_offsets"], _DTYPES[tensor["dtype"]], tensor["shape"]
    if not _are_counts(shape) or math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(
            f"a tensor of type {tensor['dtype']} and shape {shape} cannot have {stop - start} bytes"
        )
    return _Stored(dtype=dtype, shape=shape, start=begin + start)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _outlined(head: RecordHeader, kinds: Kinds) -> dict[str, Tensor | None]:
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
    """The tensors as views of `payload`; None if only safetensors, which copies, can read it."""
    if isinstance(payload, bytes):
        return None  # torch makes no views of read-only memory
    try:
        stored = _stored(_header_of(payload), kinds)
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
            Reject.MISSING_PART, f".safetensors holds {sorted(tensors)}, but no `latent`"
        )
    inputs = shaped(tensors, kinds)
    more = {name: InputKind.CHANNELS for name in (LOSS_MASK, LATENT_LOGVAR)}
    of_latent = shaped(tensors, more)
    every = len(tensors) == 1 + len(inputs) + len(of_latent)
    return ShardRecord(
        latent_CFHW=in_shape(tensors[LATENT], InputKind.CHANNELS, what=LATENT),
        inputs=inputs,
        fps=fps_of(about),
        caption=str(about.get("caption", "")),
        loss_weight=_loss_weight(about),
        level_index=_level_index(about),
        sound_seconds=_sound_seconds(about) if SOUND in inputs else None,
        loss_mask_1FHW=of_latent.get(LOSS_MASK),
        latent_logvar_CFHW=of_latent.get(LATENT_LOGVAR),
        unknown=() if every else tuple(sorted(tensors.keys() - {*_ALWAYS, *kinds})),
    )


def shaped(tensors: Mapping[str, Tensor | None], kinds: Kinds) -> dict[str, Tensor]:
    """The tensors of `kinds` that are present, each with the axes of its kind.

    Raises:
        SampleRefused: a tensor has other axes.
    """
    return {
        name: in_shape(tensors[name], kind, what=name)
        for name, kind in kinds.items()
        if tensors.get(name) is not None
    }


def _read_dfm(parts: Mapping[str, Any], kinds: Kinds) -> ShardRecord:
    latent, text = _part(parts, "pth"), _part(parts, "pickle")
    about = _read_json(_part(parts, "json"))
    latent, found = _unpickled(latent, "pth"), dfm_texts(_unpickled(text, "pickle"))
    found = {name: value for name, value in found.items() if value is not None}
    if TEXT in found and TEXT in kinds:
        found[TEXT] = trim_padding(in_shape(found[TEXT], kinds[TEXT], what=TEXT))
    return _ours({LATENT: latent, **found}, about, kinds)


def _read_mlperf(parts: Mapping[str, Any], kinds: Kinds) -> ShardRecord:
    """A record in MLPerf's form; tensors of RecordHeaders are on `meta`."""
    about = _read_json(_part(parts, "json"))
    tensors = {one.part: _part(parts, one.part) for one in MLPERF.values()}
    try:
        return _ours(mlperf_tensors(tensors), about, kinds)
    except UnusableError as error:
        raise SampleRefused(Reject.UNDECODABLE, str(error)) from error


def _unpickled(part: Any, name: str) -> Any:
    """The object that `torch.save` or pickle wrote to the part called `name`."""
    from dit import safe_pickle  # only records of DFM need it

    try:
        return safe_pickle.loads(bytes(part))
    except pickle.UnpicklingError as error:
        raise SampleRefused(Reject.UNDECODABLE, f".{name}: {error}") from error


def _part(parts: Mapping[str, Any], name: str) -> Any:
    if name not in parts:
        found = ", ".join(f".{part}" for part in parts if not part.startswith("__")) or "nothing"
        raise SampleRefused(Reject.MISSING_PART, f"the record has no .{name}; it has {found}")
    return parts[name]


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        about = parse_json(data)
    except ValueError as error:
        raise SampleRefused(Reject.UNDECODABLE, f".json cannot be read: {error}") from error
    if not isinstance(about, dict):
        raise SampleRefused(
            Reject.UNDECODABLE, f".json holds a {type(about).__name__}, not an object"
        )
    return about


def _check_version(about: dict[str, Any]) -> None:
    version = about.get("format_version", FORMAT_VERSION)
    if version == FORMAT_VERSION:
        return
    known = f".json has format_version={version!r}, and this program reads {FORMAT_VERSION}"
    if type(version) is int and version > FORMAT_VERSION:
        raise SampleRefused(Reject.NEWER, f"{known}: the program is older than the shard")
    raise SampleRefused(Reject.UNDECODABLE, f"{known}: no program has written such a version")


def _check_sum(payload: bytes | memoryview, part: str, about: dict[str, Any]) -> None:
    sums = about.get("crc32")
    if not isinstance(sums, dict) or part not in sums:
        return  # others may write none
    stored, found = str(sums[part]), f"{zlib.crc32(payload):08x}"
    if stored.lower() != found:
        raise SampleRefused(Reject.CHECKSUM, f".{part} has crc32 {found}, but .json says {stored}")


_AXES = {
    InputKind.TEXT: "LE",
    InputKind.NULL_TEXT: "LE",
    InputKind.VECTOR: "E",
    InputKind.CHANNELS: "CFHW",
    InputKind.FRAME_CHANNELS: "CFHW",
    InputKind.FRAMES: "CFHW",
    InputKind.REFERENCE: "CFHW",
    InputKind.REJECTED: "CFHW",
    InputKind.SOUND: "KA",
}


def in_shape(value: Any, kind: InputKind, *, what: str) -> Tensor:
    """`value` as a tensor with the axes of `kind`, without a batch axis; messages call it `what`.

    Raises:
        SampleRefused: `value` has other axes.
    """
    try:
        return with_axes(value, _AXES[kind], what=what)
    except UnusableError as error:
        raise SampleRefused(Reject.UNDECODABLE, str(error)) from error


def fps_of(about: dict[str, Any]) -> float:
    """Frames per second in the `.json` of a sample; NaN if it states none.

    Raises:
        SampleRefused: the value is not a positive number.
    """
    fps = about.get("fps")
    if fps is None:
        return math.nan
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise SampleRefused(Reject.UNDECODABLE, f".json: fps={fps!r} is not a positive number")
    return float(fps)


def _sound_seconds(about: dict[str, Any]) -> float | None:
    """Seconds of sound in the `.json` of a sample; None if it states none."""
    said = about.get(SOUND)
    if said is None:
        return None
    numbers: list[Any] = []
    if isinstance(said, dict):
        numbers = [said.get(n) for n in ("samples", "rate")]
    if not numbers or not all(type(n) is int and n > 0 for n in numbers):
        raise SampleRefused(
            Reject.UNDECODABLE,
            f".json: {SOUND}={said!r} lacks whole numbers `samples` and `rate` above 0",
        )
    samples, rate = numbers
    return samples / rate


def _level_index(about: Mapping[str, Any]) -> int | None:
    try:
        return level_index(about)
    except UnusableError as error:
        raise SampleRefused(Reject.LEVEL_INDEX, str(error)) from error


def _loss_weight(about: dict[str, Any]) -> float:
    """Factor of the sample's loss in its `.json`; 1 by default."""
    weight = about.get("loss_weight")
    if weight is None:
        return 1.0
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= MOST_WEIGHT:
        raise SampleRefused(
            Reject.LOSS_WEIGHT,
            f".json: loss_weight={weight!r} is not a number from 0 to {MOST_WEIGHT:g}",
        )
    return float(weight)
