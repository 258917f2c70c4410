"""Decodes records of shards to LatentSamples, or refuses them with a reason.

1. measure_sample    the size of a sample in a pack, from the head of its record without tensors
   size_in_pack      the same for a record of any form; it may decode tensors
2. cook              a whole record becomes a LatentSample, when it is chosen for a pack
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dit.batch import TEXT, LatentSample
from dit.config import RunConfig
from dit.data.pack import SampleSize, references
from dit.data.records import (
    LATENT_LOGVAR,
    LOSS_MASK,
    MOST_WEIGHT,
    Kinds,
    ShardRecord,
    has_outline,
    read_outline,
    read_record,
)
from dit.data.rejections import Reject, SampleRefused
from dit.models.family import InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.stored_samples import RecordHeader
from dit.token_ids import are_ids


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What model and pack demand of samples: channels, widths, lengths, inputs."""

    layout: PatchLayout
    family: str
    channels: int
    text_width: int
    capacity: int
    """Most tokens of a pack."""
    table: tuple[int, int, int] | None
    """The largest latent (frames, rows, columns in cells) that the network accepts; None: any."""

    @property
    def pack_bytes(self) -> int:
        """Estimate of the largest size in bytes of a pack of `capacity` tokens with all its inputs.

        The estimate is too small if texts have more than twice as many tokens as latents.
        """
        features, each = self.channels * math.prod(self.layout.patch), 64
        for one in self.layout.inputs:
            match one.kind:
                case InputKind.TEXT | InputKind.NULL_TEXT:
                    each += 8 * one.width
                case InputKind.VECTOR:
                    each += 4 * one.width // self.layout.sample_multiple
                case InputKind.CHANNELS:
                    each += 4 * one.width * math.prod(self.layout.patch)
                case InputKind.SOUND:
                    features = max(features, one.width)
                case InputKind.FRAME_CHANNELS:
                    each += 4 * (one.width + 1) * math.prod(self.layout.patch)
        return self.capacity * (4 * features + each)

    @cached_property
    def kinds(self) -> Kinds:
        """Name -> kind of each input of a sample besides the latent."""
        return {one.name: one.kind for one in self.layout.inputs}

    @classmethod
    def of(cls, config: RunConfig) -> Expected:
        """The requirements on samples of validation and generation."""
        return cls._of(config, PatchLayout.of(config))

    @classmethod
    def of_training(cls, config: RunConfig) -> Expected:
        """The requirements on training samples, which may be preference pairs."""
        return cls._of(config, PatchLayout.of_training(config))

    @classmethod
    def _of(cls, config: RunConfig, layout: PatchLayout) -> Expected:
        return cls(
            layout=layout,
            family=config.model.family,
            channels=config.model.in_channels,
            text_width=config.model.crossattn_emb_size,
            capacity=config.dataset.task_encoder_seq_length,
            table=config.model.largest_latent,
        )


_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # as bits; NaN has larger ones
_FEW = 2**13  # numbers; for fewer, a sum is faster than integer views
_MOST_LOGVAR = 40  # a deviation of 5e8; autoencoders of Diffusers clamp theirs to 20
SMALL = 8192
"""Samples of at most this many bytes are decoded when they are read, which is faster than reading
twice."""


def measure_sample(parts: Mapping[str, Any], expected: Expected) -> SampleSize | None:
    """Size in a pack of the sample in `parts`, from its head; None if only `cook` can find it.

    `parts` are bytes by extension; `.safetensors` is the whole file or a RecordHeader. The result
    is None for a whole file of at most SMALL bytes, for a record in DFM's form and for a record
    that does not pass the checks. `cook` reads all of a record, so it finds the right reason for a
    refusal.
    """
    payload = parts.get("safetensors")
    if payload is not None and not isinstance(payload, RecordHeader) and len(payload) <= SMALL:
        return None
    if not has_outline(parts):
        return None
    try:
        return size_in_pack(parts, expected)
    except SampleRefused:
        return None


def size_in_pack(parts: Mapping[str, Any], expected: Expected) -> SampleSize:
    """Size in a pack of the sample in the record `parts` (extension -> bytes or RecordHeader).

    Tensors are not decoded for that if the record has this project's form. They are decoded if it
    has DFM's form, or MLPerf's form with parts that are not RecordHeaders.

    Raises:
        SampleRefused: the record is damaged, or the sample does not fit the model or the pack.
    """
    if not has_outline(parts):
        return SampleSize.of(cook(parts, expected, key=""), expected.layout)
    outline = read_outline(parts, expected.kinds)
    return SampleSize.of(_checked(outline, expected, key=""), expected.layout)


def cook(
    parts: Mapping[str, Any], expected: Expected, *, key: str, source: str = ""
) -> LatentSample:
    """Decodes the `parts` (extension -> bytes) of one record to a LatentSample, and checks it.

    `key` and `source` are only copied to the sample.

    Raises:
        SampleRefused: the record is damaged, or the sample does not fit the model or the pack.
    """
    sample = _checked(read_record(parts, expected.kinds), expected, key=key, source=source)
    # Last, because only this looks at every number.
    if not _all_finite(sample.latent_CFHW):
        raise SampleRefused(Reject.NOT_FINITE, _count_bad(sample.latent_CFHW))
    if not _all_finite(sample.text_LE):
        raise SampleRefused(Reject.TEXT_NOT_FINITE, _count_bad(sample.text_LE))
    for name, values in sample.others.items():
        if not _all_finite(values):
            raise SampleRefused(Reject.INPUT_NOT_FINITE, f"`{name}`: {_count_bad(values)}")
    _check_tokens(sample, expected)
    _check_mask_numbers(sample.loss_mask_1FHW)
    _check_logvar_numbers(sample.latent_logvar_CFHW)
    return sample


def _checked(
    record: ShardRecord, expected: Expected, *, key: str, source: str = ""
) -> LatentSample:
    """The sample in `record`, after checks of its shapes, its sound rate and its size in a pack.

    Raises:
        SampleRefused: the sample does not fit the model or the pack.
    """
    latent_CFHW, others, text_LE = record.latent_CFHW, {}, None
    check_latent(latent_CFHW, expected)
    for one in expected.layout.inputs:
        value = record.inputs.get(one.name)
        if one.name == TEXT:
            text_LE = _checked_text(value, one, expected)
        elif value is not None:
            others[one.name] = _checked_input(value, one, latent_CFHW, expected)
            if one.kind is InputKind.SOUND:
                _check_rate(value, record.sound_seconds, one)
        elif one.required:
            raise _lacking(one, expected)
    sample = LatentSample(
        key=key,
        latent_CFHW=latent_CFHW if latent_CFHW.is_contiguous() else latent_CFHW.contiguous(),
        text_LE=_no_text(expected.text_width) if text_LE is None else text_LE,
        fps=record.fps,
        caption=record.caption,
        source=source,
        loss_weight=record.loss_weight,
        loss_mask_1FHW=_of_cells(record.loss_mask_1FHW, latent_CFHW[:1], Reject.LOSS_MASK),
        latent_logvar_CFHW=_of_cells(record.latent_logvar_CFHW, latent_CFHW, Reject.LOGVAR),
        level_index=record.level_index,
        others=others,
        unknown=record.unknown,
    )
    if expected.layout.in_pairs and sample.loss_weight != 1:
        raise SampleRefused(
            Reject.LOSS_WEIGHT,
            f".json has loss_weight={sample.loss_weight:g}, but pairs of objective.preference have"
            " no weights",
        )
    if expected.layout.in_pairs and sample.latent_logvar_CFHW is not None:
        raise SampleRefused(
            Reject.LOGVAR,
            f"`{LATENT_LOGVAR}` belongs to only one latent of the pair, but objective.preference"
            " compares both",
        )
    if others or expected.layout.counts_text:
        _check_room(sample, expected)
    return sample


def _check_tokens(sample: LatentSample, expected: Expected) -> None:
    """Refuses token ids beyond the vocabulary of the network."""
    for one in expected.layout.inputs:
        digits = sample.others.get(one.name)
        if one.vocabulary is None or digits is None:
            continue
        if not are_ids(digits, vocabulary=one.vocabulary):
            raise SampleRefused(
                Reject.TOKENS,
                f"`{one.name}` has token ids that are not whole numbers from 0 to"
                f" {one.vocabulary - 1}",
            )


def _of_cells(values: Tensor | None, latent: Tensor, reason: Reject) -> Tensor | None:
    """A loss mask or log variances as contiguous float32; None if `values` is None.

    Raises:
        SampleRefused: for `reason`, because `values` have another shape than `latent`.
    """
    if values is None:
        return None
    if values.shape != latent.shape:
        name = LOSS_MASK if reason is Reject.LOSS_MASK else LATENT_LOGVAR
        shape, wanted = list(values.shape), list(latent.shape)
        raise SampleRefused(reason, f"`{name}` has shape {shape}, but the latent needs {wanted}")
    return values.float().contiguous()


def _check_mask_numbers(mask_1FHW: Tensor | None) -> None:
    """Refuses a mask [1, F, H, W] with NaN, or with negative or too large weights."""
    if mask_1FHW is None:
        return
    low, high = mask_1FHW.min().item(), mask_1FHW.max().item()
    if not 0 <= low <= high <= MOST_WEIGHT:  # nor is NaN
        raise SampleRefused(
            Reject.LOSS_MASK,
            f"`loss_mask` has weights from {low:g} to {high:g}, not within 0 to {MOST_WEIGHT:g}",
        )


def _check_logvar_numbers(logvar_CFHW: Tensor | None) -> None:
    """Refuses log variances [C, F, H, W] that are NaN or larger than any autoencoder's."""
    if logvar_CFHW is not None and not logvar_CFHW.max().item() <= _MOST_LOGVAR:
        raise SampleRefused(
            Reject.LOGVAR,
            f"`{LATENT_LOGVAR}` has NaN or numbers above {_MOST_LOGVAR}; the largest is"
            f" {logvar_CFHW.max().item():g}",
        )


def check_inputs(sample: LatentSample, expected: Expected) -> None:
    """Checks the inputs of a sample that does not come from a shard, such as a prompt's.

    Raises:
        SampleRefused: an input is missing, or does not fit the model and the latent.
    """
    for one in expected.layout.inputs:
        value = sample.inputs.get(one.name)
        if value is not None:
            _checked_input(value, one, sample.latent_CFHW, expected)
        elif one.required:
            raise _lacking(one, expected)


def _check_rate(latent_KA: Tensor, seconds: float | None, one: SampleInput) -> None:
    """Refuses a sound whose number of latent frames is not `seconds` * `one.rate`, rounded.

    Rounding up, down or to the nearest is accepted. If `seconds` or `one.rate` is None, nothing is
    checked.
    """
    if seconds is None or one.rate is None:
        return
    # A codec rounds to whole frames: up, or to the nearest. Frames begin at whole samples, of which
    # there are fewer than a million a second.
    frames, wanted = latent_KA.shape[1], one.sound_frames(seconds)
    if abs(frames - seconds * one.rate) > 1 - 1e-6 and frames != wanted:
        raise SampleRefused(
            Reject.INPUT_SHAPE,
            f"`{one.name}` of {seconds:g} s has {frames} latent frames, but model.sound_rate="
            f"{one.rate:g} asks for {wanted}; set model.sound_rate to the number of latent frames"
            " that the audio processor makes per second",
        )


def _lacking(one: SampleInput, expected: Expected) -> SampleRefused:
    if one.kind is InputKind.REJECTED:
        return SampleRefused(
            Reject.NO_PAIR, f"there is no `{one.name}`, which objective.preference needs"
        )
    how = f"; `data_prep --processor {one.encoder}` makes it" if one.vocabulary else ""
    return SampleRefused(
        Reject.NO_INPUT,
        f"there is no `{one.name}`, which model.family={expected.family} needs{how}",
    )


def _check_room(sample: LatentSample, expected: Expected) -> None:
    size = SampleSize.of(sample, expected.layout)
    if size.tokens > expected.capacity:
        parts = [f"latent {list(sample.latent_CFHW.shape)}"]
        parts += [f"reference {list(x.shape)}" for x in references(sample, expected.layout)]
        parts += [f"{size.shape[1]} rows of text"] if expected.layout.counts_text else []
        parts += [f"{size.sound} frames of sound"] if size.sound else []
        raise SampleRefused(
            Reject.TOO_LONG,
            f"the sample ({', '.join(parts)}) takes {size.tokens} tokens, more than"
            f" dataset.task_encoder_seq_length={expected.capacity}",
        )


def _checked_input(
    value: Tensor, one: SampleInput, latent_CFHW: Tensor, expected: Expected
) -> Tensor:
    """The input `value` as contiguous bfloat16 or float32, after a check of its shape.

    The shape is [L, E] for a text, [E] for a vector, [E, A] for a sound of A latent frames, and
    [C, F, H, W] for all other kinds. The sizes of some kinds must be those of the latent.

    Raises:
        SampleRefused: the shape does not fit the model or the latent.
    """
    shape, layout = list(value.shape), expected.layout
    channels, frames, *sides = latent_CFHW.shape
    match one.kind:
        case InputKind.TEXT | InputKind.NULL_TEXT:
            wanted = f"[{'any' if one.rows is None else one.rows}, {one.width}]"
            fits = shape[1] == one.width and (len(value) > 0 or one.may_be_empty)
            fits = fits and one.rows in (None, len(value))
        case InputKind.VECTOR:
            wanted, fits = f"[{one.width}]", shape == [one.width]
        case InputKind.CHANNELS:
            wanted = [one.width, frames, *sides]
            fits = shape == wanted
        case InputKind.FRAMES | InputKind.FRAME_CHANNELS:
            whole = f" of whole patches (model.patch_temporal={layout.patch_temporal})"
            wanted = f"[{channels}, 1..{frames}, {sides[0]}, {sides[1]}]"
            wanted += whole if layout.patch_temporal > 1 else ""
            fits = [shape[0], *shape[2:]] == [channels, *sides] and shape[1] <= frames
            fits = fits and shape[1] % layout.patch_temporal == 0
        case InputKind.SOUND:
            wanted, fits = f"[{one.width}, any]", shape[0] == one.width and shape[1] > 0
        case InputKind.REJECTED:
            wanted, fits = list(latent_CFHW.shape), shape == list(latent_CFHW.shape)
        case InputKind.REFERENCE:
            parts = [layout.patch_temporal, *[max(layout.side_cells, layout.patch_spatial)] * 2]
            wanted = f"[{channels}, frames, rows, columns] in multiples of {parts}"
            fits = shape[0] == channels
            fits = fits and not any(n % p for n, p in zip(shape[1:], parts, strict=True))
    if not fits:
        whose = f"model.family={expected.family}"
        if one.kind is InputKind.REJECTED:
            whose = "objective.preference, with a latent of that shape,"
        raise SampleRefused(
            Reject.INPUT_SHAPE, f"`{one.name}` has shape {shape}, but {whose} takes {wanted}"
        )
    _check_rows(value, one, expected)
    return _as_trained(value).contiguous()


def check_latent(latent_CFHW: Tensor, expected: Expected) -> None:
    """Checks that the latent [C, F, H, W] fits the model and the pack.

    Raises:
        SampleRefused: the latent does not fit.
    """
    channels, *size = latent_CFHW.shape
    shape, layout = list(latent_CFHW.shape), expected.layout
    if channels != expected.channels:
        raise SampleRefused(
            Reject.CHANNELS,
            f"latent {shape} has {channels} channels, but model.in_channels={expected.channels}",
        )
    if any(length % patch for length, patch in zip(size, layout.patch, strict=True)):
        raise SampleRefused(
            Reject.NOT_PATCHABLE,
            f"latent {shape}: its frames must be a multiple of"
            f" model.patch_temporal={layout.patch_temporal}, and its rows and columns of"
            f" model.patch_spatial={layout.patch_spatial}",
        )
    if any(side % layout.side_cells for side in size[1:]):
        raise SampleRefused(
            Reject.NOT_PATCHABLE,
            f"latent {shape}: model.family={expected.family} takes only rows and columns that are"
            f" multiples of {layout.side_cells}; pack the data with the --processor of this family",
        )
    tokens = layout.copies * layout.padded_tokens(latent_CFHW)
    if tokens > expected.capacity:
        what = "a pair of latents" if layout.in_pairs else "latent"
        raise SampleRefused(
            Reject.TOO_LONG,
            f"{what} {shape} takes {tokens} tokens, more than"
            f" dataset.task_encoder_seq_length={expected.capacity}",
        )
    table = expected.table
    if table is not None and any(a > b for a, b in zip(size, table, strict=True)):
        raise SampleRefused(
            Reject.BEYOND_TABLE,
            f"latent {shape} is larger than the {table} frames, rows and columns that the network"
            " takes",
        )


def _checked_text(text_LE: Tensor | None, one: SampleInput, expected: Expected) -> Tensor:
    if (text_LE is None and one.required) or (
        text_LE is not None and len(text_LE) == 0 and not one.may_be_empty
    ):
        raise SampleRefused(
            Reject.NO_TEXT, "there is no `text`" if text_LE is None else "`text` has 0 tokens"
        )
    if text_LE is None:
        return _no_text(one.width)
    if text_LE.shape[1] != expected.text_width:
        raise SampleRefused(
            Reject.TEXT_WIDTH,
            f"text {list(text_LE.shape)} has width {text_LE.shape[1]}, but"
            f" model.crossattn_emb_size={expected.text_width}",
        )
    _check_rows(text_LE, one, expected)
    return _as_trained(text_LE)


def _check_rows(rows_LE: Tensor, one: SampleInput, expected: Expected) -> None:
    if one.most_rows is not None and len(rows_LE) > one.most_rows:
        raise SampleRefused(
            Reject.TEXT_ROWS,
            f"`{one.name}` has {len(rows_LE)} rows, but model.family={expected.family} takes at"
            f" most {one.most_rows}",
        )


def _no_text(width: int) -> Tensor:
    return torch.empty(0, width, dtype=torch.bfloat16)


def _as_trained(values: Tensor) -> Tensor:
    return values if values.dtype == torch.bfloat16 else values.float()


def _all_finite(values: Tensor) -> bool:
    infinity = _INFINITY.get(values.dtype)
    if infinity is None or values.numel() < _FEW:
        # A sum is faster than isfinite(): finite if all numbers are, unless it overflows.
        total = values.sum(dtype=torch.float32).item()
        return math.isfinite(total) or bool(values.isfinite().all())
    # For these types a sum would make a float32 copy. With their bits as integers, infinity and
    # NaN are the largest numbers: the positive ones as int16, the negative ones as uint16.
    bits = values.view(torch.int16).numpy()
    return bits.max() < infinity and bits.view(np.uint16).max() < infinity + 0x8000


def _count_bad(values: Tensor) -> str:
    return f"NaN or Inf in {int((~values.isfinite()).sum())} of {values.numel()} numbers"
