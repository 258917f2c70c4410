"""Joins samples to a pack (PackedBatch).

1. SampleSize                  the numbers of tokens that bin_packing.py needs
2. pack_samples, PackWriter    write the samples of a pack: patches, positions, padding
"""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; A axes of positions; E text width
# F H W frames, rows, columns, of the latent or in patches

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit.batch import (
    REJECTED_LATENT,
    SOUND,
    WHOLE,
    CleanTokens,
    Grid,
    GuidanceInput,
    LatentSample,
    LatentVariance,
    NullTexts,
    PackedBatch,
    Pairs,
    PictureTexts,
    ReferenceGrids,
    TokenStream,
    TokenWeights,
    by_type,
    pack_identity,
)
from dit.models.family import InputKind
from dit.models.patch_layout import PatchLayout
from dit.models.positions import padded_positions, write_patches
from dit.pack_wire import private_bytes, views_of, widest_first


class SampleSize(NamedTuple):
    """Size of a sample in a pack; for a pair, all fields but `tokens` describe one latent."""

    tokens: int
    """Tokens that count towards the pack's capacity, those of both latents for a pair."""
    rows: int
    """Latent tokens in the pack, with padding."""
    shape: tuple[int, int]
    """(latent tokens in attention, text tokens of all text inputs)."""
    texts: tuple[int, ...]
    """Tokens of each text input, in the order of the family's inputs."""
    null_rows: int
    """Tokens of the null text that the sample itself has."""
    dtypes: tuple[torch.dtype | None, ...]
    """Dtypes of the latent and of each input, in the order of the family's inputs; None for a
    missing input."""
    unknown: tuple[str, ...] = ()
    """Names of tensors in the sample that the family does not read."""
    is_weighted: bool = False
    """Whether the sample has loss weights for its tokens."""
    is_drawn: bool = False
    """Whether the latent is a mean, with log variances to draw from."""
    level_index: int | None = None
    """The k of the sample's fixed noise level in validation, k / 8; None if its shard has none."""
    sound: int = 0
    """Tokens of the sample's sound, which are a stream of their own."""

    @classmethod
    def of(cls, sample: LatentSample, layout: PatchLayout) -> SampleSize:
        """The size of `sample`, whose tensors may be on the device `meta`."""
        inputs, latent_CFHW = sample.inputs, sample.latent_CFHW
        grid = layout.grid(latent_CFHW)
        tokens = math.prod(grid)
        for latent in references(sample, layout):
            tokens += math.prod(layout.grid(latent))
        texts: list[int] = []
        null_rows = 0
        dtypes: list[torch.dtype | None] = [latent_CFHW.dtype]
        for one in layout.inputs:
            value = inputs.get(one.name)
            dtypes.append(None if value is None else value.dtype)
            if one.kind is InputKind.TEXT:
                texts.append(0 if value is None else value.shape[0])
            elif one.kind is InputKind.NULL_TEXT and value is not None:
                null_rows = value.shape[0]
        rows, text = layout.padded(grid, tokens), sum(texts)
        sound = inputs[SOUND].shape[1] if layout.sound is not None and SOUND in inputs else 0
        return cls(
            tokens=layout.copies * (rows + layout.text_room(text) + layout.filled(sound)),
            rows=rows,
            shape=(layout.attended(grid, tokens), text),
            texts=tuple(texts),
            null_rows=null_rows,
            dtypes=tuple(dtypes),
            unknown=sample.unknown,
            is_weighted=sample.is_weighted,
            is_drawn=sample.latent_logvar_CFHW is not None,
            level_index=sample.level_index,
            sound=sound,
        )


NULL_ROWS = "NullTexts.rows_LE"
"""Name, in a pack, of the tensor of null texts for dropped captions."""
LOGVAR = "LatentVariance.logvar_TC"
"""Name, in a pack, of the tensor of log variances of latents."""
WEIGHT = "TokenWeights.weight_T"
"""Name, in a pack, of the tensor of loss weights."""


def references(sample: LatentSample, layout: PatchLayout) -> list[Tensor]:
    """The reference latents of `sample`, in the order of the family's inputs."""
    names = layout.named(InputKind.REFERENCE)
    found = [sample.others.get(name) for name in names] if names else []
    return [latent for latent in found if latent is not None]


def pack_samples(samples: Sequence[LatentSample], layout: PatchLayout) -> PackedBatch:
    """Packs `samples` end to end; padding tokens are zero, at position 0, and not real."""
    sizes = [SampleSize.of(sample, layout) for sample in samples]
    writer = PackWriter(layout, sizes, channels=len(samples[0].latent_CFHW))
    for sample in samples:
        writer.add(sample)
    return writer.finish()


def common_dtype(dtypes: Iterable[torch.dtype | None]) -> torch.dtype:
    """bfloat16 if all `dtypes` that are not None are bfloat16, else float32.

    It is float32 too if all are None.
    """
    return torch.bfloat16 if {*dtypes} - {None} == {torch.bfloat16} else torch.float32


def _outlines(
    layout: PatchLayout, sizes: Sequence[SampleSize], *, channels: int
) -> dict[str, Tensor]:
    """Tensors on `meta` with dtype and shape of each tensor of a pack, by name.

    The names are those of `PackedBatch.tensors`, in the order in which the tensors lie in memory.
    """
    rows, count = sum(size.rows for size in sizes), len(sizes)
    axes, volume = layout.positions.axes, math.prod(layout.patch)
    dtypes = [size.dtypes[0] for size in sizes]
    # The latents come first: two neighbours of them are written as one number of twice the width.
    shapes: dict[str, tuple[Any, ...]] = {"latent_TC": ()}
    condition_width, condition_dtypes = 0, []
    lengths = iter(zip(*(size.texts for size in sizes), strict=True))
    for number, one in enumerate(layout.inputs, start=1):
        own = [size.dtypes[number] for size in sizes]
        match one.kind:
            case InputKind.TEXT:
                shapes[f"texts.{one.name}"] = (common_dtype(own), sum(next(lengths)), one.width)
            case InputKind.NULL_TEXT if any(size.null_rows for size in sizes):
                rows_of_null = sum(size.null_rows for size in sizes)
                shapes[NULL_ROWS] = (common_dtype(own), rows_of_null, one.width)
            case InputKind.VECTOR:
                shapes[f"vectors.{one.name}"] = (common_dtype(own), count, one.width)
            case InputKind.CHANNELS:
                condition_width += one.width * volume
                condition_dtypes += own
            case InputKind.FRAME_CHANNELS:
                condition_width += (one.width + 1) * volume
                condition_dtypes += own
            case InputKind.FRAMES | InputKind.REFERENCE | InputKind.REJECTED:
                dtypes += own
    if condition_width:
        shapes["condition_TC"] = (common_dtype(condition_dtypes), rows, condition_width)
    shapes |= {
        "latent_TC": (common_dtype(dtypes), rows, channels * volume),
        "position_TA": (torch.float32, rows, axes),
        "segment_T": (torch.int64, rows),
        "is_real_T": (torch.bool, rows),
        "is_target_T": (torch.bool, rows),
        "level_row_T": (torch.int64, rows),
        "fps_N": (torch.float32, count),
    }
    shapes |= _of_some(sizes, rows, width=channels * volume)
    shapes |= SoundRows.shapes(layout, sizes)
    outlines = {n: torch.empty(size, dtype=d, device="meta") for n, (d, *size) in shapes.items()}
    return widest_first(outlines)


def _of_some(sizes: Sequence[SampleSize], rows: int, *, width: int) -> dict[str, tuple[Any, ...]]:
    """Name -> (dtype, *shape) of the log variances and the loss weights of a pack, if it has them.

    A pack has such a tensor if at least one sample of `sizes` has one. `rows` is the number of
    latent tokens, and `width` that of the features of a token.
    """
    shapes: dict[str, tuple[Any, ...]] = {}
    if any(size.is_drawn for size in sizes):
        shapes[LOGVAR] = (torch.float32, rows, width)
    if any(size.is_weighted for size in sizes):
        shapes[WEIGHT] = (torch.float32, rows)
    return shapes


class PackWriter:
    """Writes a pack sample by sample, so that each sample's memory can be freed after its copy.

    All tensors lie in one buffer, which can be sent to other processes as bytes.
    """

    def __init__(
        self,
        layout: PatchLayout,
        sizes: Sequence[SampleSize],
        *,
        channels: int,
        memory: Callable[[int], Tensor] = private_bytes,
    ):
        """Reserves memory for samples of the `sizes`; `add` may be called for fewer samples.

        `channels` is the number of channels of a latent, and `memory(n)` returns a tensor of n
        bytes.
        """
        self._layout = layout
        sizes = [size for size in sizes for _ in range(layout.copies)]
        outlines = _outlines(layout, sizes, channels=channels)
        self._tensors = views_of(memory(sum(t.nbytes for t in outlines.values())), outlines)
        self._sound = None if layout.sound is None else SoundRows(layout, self._tensors)
        self._added: list[_Added] = []
        self._start = 0
        self._texts = {name: [0] for name in layout.named(InputKind.TEXT)}
        self._text_rows = {name: self._tensors.pop(f"texts.{name}") for name in self._texts}
        self._null_rows, self._null_starts = self._tensors.pop(NULL_ROWS, None), [0]

    def add(self, sample: LatentSample) -> None:
        """Writes `sample`, or both samples of a pair, after the samples written before."""
        self._write(sample)
        if self._layout.in_pairs:
            # With a key of its own, so that messages distinguish the two samples.
            key, latent_CFHW = f"{sample.key} (rejected)", sample.others[REJECTED_LATENT]
            self._write(replace(sample, key=key, latent_CFHW=latent_CFHW))

    def _write(self, sample: LatentSample) -> None:
        layout, latent_TC, first = self._layout, self._tensors["latent_TC"], self._start
        latents, at = [sample.latent_CFHW, *references(sample, layout)], first
        grids = tuple([layout.grid(latent_CFHW) for latent_CFHW in latents])
        for latent_CFHW, grid in zip(latents, grids, strict=True):
            stop = at + math.prod(grid)
            write_patches(latent_TC[at:stop], latent_CFHW, grid, layout.patch)
            at = stop
        self._start = first + layout.padded(grids[0], at - first)
        if at < self._start:
            latent_TC[at : self._start] = 0
        clean = self._write_given_frames(sample, grids[0], first)
        if LOGVAR in self._tensors:
            self._write_logvar(sample, grids[0], first, clean)
        if WEIGHT in self._tensors:
            self._write_weights(sample, grids[0], first)
        if "condition_TC" in self._tensors:
            self._write_condition(sample, grids[0], first)
        self._write_texts_and_vectors(sample)
        if self._sound is not None:
            self._sound.add(sample.others.get(SOUND))
        self._added.append(
            _Added(
                key=sample.key,
                caption=sample.caption,
                fps=sample.fps,
                grids=grids,
                padded=self._start - first,
                clean=clean,
            )
        )

    def _write_texts_and_vectors(self, sample: LatentSample) -> None:
        inputs = sample.inputs
        for name, starts in self._texts.items():
            text_LE, first = inputs.get(name), starts[-1]
            starts.append(first if text_LE is None else first + text_LE.shape[0])
            if text_LE is not None:
                self._text_rows[name][first : starts[-1]] = text_LE
        if self._null_rows is not None:
            self._write_null_text(inputs)
        for name in self._layout.named(InputKind.VECTOR):
            vector_E = inputs.get(name)
            row_E = self._tensors[f"vectors.{name}"][len(self._added)]
            row_E.zero_() if vector_E is None else row_E.copy_(vector_E)

    def _write_null_text(self, inputs: Mapping[str, Tensor]) -> None:
        """Writes the null text of a sample; a sample without null text gets no rows."""
        assert self._null_rows is not None
        first = stop = self._null_starts[-1]
        for name in self._layout.named(InputKind.NULL_TEXT):
            if name in inputs:
                stop = first + inputs[name].shape[0]
                self._null_rows[first:stop] = inputs[name]
        self._null_starts.append(stop)

    def _write_given_frames(self, sample: LatentSample, grid: Grid, first: int) -> int:
        """Writes frames that condition a sample (kind FRAMES) over the first frames of its target.

        Returns the number of their tokens: 0 if there are none, or if they would cover all frames
        of the target, because nothing would be left to learn.
        """
        for name in self._layout.named(InputKind.FRAMES):
            given_CFHW = sample.others.get(name)
            if given_CFHW is not None:
                given = self._layout.grid(given_CFHW)
                if given[0] < grid[0]:
                    own_TC = self._tensors["latent_TC"][first : first + math.prod(given)]
                    write_patches(own_TC, given_CFHW, given, self._layout.patch)
                    return len(own_TC)
        return 0

    def _write_logvar(self, sample: LatentSample, grid: Grid, first: int, clean: int) -> None:
        """Writes the log variance of the target's tokens, or -inf where the latent is not drawn.

        -inf means variance 0. It is written for the first `clean` tokens, for references and
        padding, and for a sample without log variance.
        """
        own_TC = self._tensors[LOGVAR][first : self._start].fill_(-math.inf)
        if sample.latent_logvar_CFHW is not None:
            target_TC = own_TC[: math.prod(grid)]
            write_patches(target_TC, sample.latent_logvar_CFHW, grid, self._layout.patch)
            target_TC[:clean] = -math.inf

    def _write_weights(self, sample: LatentSample, grid: Grid, first: int) -> None:
        """Writes the sample's loss weight for each of its tokens.

        For target tokens it is multiplied by the mean of the loss mask over the token's patch.
        """
        own_T = self._tensors[WEIGHT][first : self._start].fill_(sample.loss_weight)
        if sample.loss_mask_1FHW is not None:
            patches_TC = own_T.new_empty(math.prod(grid), math.prod(self._layout.patch))
            write_patches(patches_TC, sample.loss_mask_1FHW, grid, self._layout.patch)
            own_T[: len(patches_TC)] *= patches_TC.mean(1)

    def _write_condition(self, sample: LatentSample, grid: Grid, first: int) -> None:
        """Writes the channels of all `CHANNELS` and `FRAME_CHANNELS` inputs side by side, or zeros.

        A mask follows each `FRAME_CHANNELS` input: 1 in tokens of the frames that it has. A
        `FRAME_CHANNELS` input with all frames of the target is left out.
        """
        own_TC = self._tensors["condition_TC"][first : self._start]
        own_TC.zero_()
        column, volume = 0, math.prod(self._layout.patch)
        for one in self._layout.inputs:
            of_frames = one.kind is InputKind.FRAME_CHANNELS
            if not of_frames and one.kind is not InputKind.CHANNELS:
                continue
            width = one.width * volume
            channels_CFHW = sample.others.get(one.name)
            given = None if channels_CFHW is None else self._layout.grid(channels_CFHW)
            if channels_CFHW is not None and given and not (of_frames and given[0] >= grid[0]):
                patches_TC = own_TC.new_empty(math.prod(given), width)
                write_patches(patches_TC, channels_CFHW, given, self._layout.patch)
                own_TC[: len(patches_TC), column : column + width] = patches_TC
                if of_frames:
                    own_TC[: len(patches_TC), column + width : column + width + volume] = 1
            column += width + volume * of_frames

    def finish(self) -> PackedBatch:
        """The finished pack, cut to the samples that were written."""
        added, layout, count = self._added, self._layout, len(self._added)
        texts = {n: self._text_rows[n][: starts[-1]] for n, starts in self._texts.items()}
        names = layout.named(InputKind.VECTOR)
        vectors = {n: self._tensors.pop(f"vectors.{n}")[:count] for n in names}
        null, fps_N = self._null_rows, self._tensors.pop("fps_N")[:count]
        fps_N.copy_(torch.tensor([a.fps for a in added], dtype=torch.float32))
        tensors = {n: t[: self._start] for n, t in self._tensors.items()}
        logvar, weight = tensors.pop(LOGVAR, None), tensors.pop(WEIGHT, None)
        spans = [padded_positions(a.grids, a.padded, a.fps, layout.positions) for a in added]
        padded, keys = [a.padded for a in added], tuple(a.key for a in added)
        torch.cat([position for position, _ in spans], out=tensors["position_TA"])
        torch.cat([is_real for _, is_real in spans], out=tensors["is_real_T"])
        owners = torch.arange(count)
        tensors["segment_T"].copy_(owners.repeat_interleave(torch.tensor(padded)))
        has_clean = self._mark_given(tensors)
        return PackedBatch(
            **tensors,  # type: ignore[arg-type]  # by the names of the fields
            texts=texts,
            text_offsets={name: tuple(starts) for name, starts in self._texts.items()},
            vectors=vectors,
            fps_N=fps_N,
            grids=tuple(a.grids[0] for a in added),
            starts=tuple(accumulate(padded, initial=0)),
            keys=keys,
            captions=tuple(a.caption for a in added),
            pack_id=pack_identity(keys),
            share=WHOLE,
            methods=self._methods(has_clean, null=null, logvar=logvar, weight=weight),
            others={} if self._sound is None else {SOUND: self._sound.finish()},
        )

    def _methods(
        self,
        has_clean: bool,
        *,
        null: Tensor | None,
        logvar: Tensor | None,
        weight: Tensor | None,
    ) -> Mapping[type, Any]:
        """Data of the optional methods that this pack uses (such as LatentVariance), by type."""
        added, layout = self._added, self._layout
        starts, level = tuple(self._null_starts), layout.clean_level
        level = level if has_clean or layout.draws_given_frames else None
        references = tuple(a.grids[1:] for a in added)
        clean = tuple(a.clean for a in added)
        return by_type(
            None if logvar is None else LatentVariance(logvar_TC=logvar),
            None if weight is None else TokenWeights(weight_T=weight),
            None if null is None else NullTexts(rows_LE=null[: starts[-1]], starts=starts),
            ReferenceGrids(of=references) if any(references) else None,
            None if level is None else CleanTokens(level=level, counts=clean),
            None if layout.guidance is None else GuidanceInput(scale=layout.guidance),
            PictureTexts(names=layout.pictures) if layout.pictures else None,
            Pairs() if layout.in_pairs else None,
        )

    def _mark_given(self, tensors: dict[str, Tensor]) -> bool:
        """Sets `is_target_T` and `level_row_T`; returns whether any token is clean.

        `level_row_T` is each token's row in the table of noise levels: n for noised tokens of
        sample n of N, and N + n for its clean tokens.
        """
        is_target_T, level_row_T = tensors["is_target_T"], tensors["level_row_T"]
        is_target_T.copy_(tensors["is_real_T"])
        level_row_T.copy_(tensors["segment_T"])
        first, any_clean = 0, False
        for a in self._added:
            own = math.prod(a.grids[0])
            spans = [(0, a.clean, True)] if a.clean else []
            if len(a.grids) > 1:
                spans += [(own, sum(map(math.prod, a.grids)), self._layout.clean_references)]
            for start, stop, is_clean in spans:
                is_target_T[first + start : first + stop] = False
                level_row_T[first + start : first + stop] += len(self._added) * is_clean
                any_clean |= is_clean
            first += a.padded
        return any_clean


class SoundRows:
    """Writes the sounds of samples as tokens, one for each latent frame.

    The position of a token is the number of its frame. Sounds lie end to end, each padded as
    samples are; a sample without sound has no tokens.
    """

    _PREFIX = f"others.{SOUND}."

    def __init__(self, layout: PatchLayout, tensors: dict[str, Tensor]):
        """Removes the tensors of the sound stream from `tensors`, a pack's, and will write them."""
        names = [name for name in tensors if name.startswith(self._PREFIX)]
        self._layout = layout
        self._tensors = {n.removeprefix(self._PREFIX): tensors.pop(n) for n in names}
        self._lengths: list[int] = []
        self._starts = [0]

    @classmethod
    def shapes(cls, layout: PatchLayout, sizes: Sequence[SampleSize]) -> dict[str, tuple[Any, ...]]:
        """Name of each tensor of the sound stream in a pack -> (dtype, *shape)."""
        if layout.sound is None:
            return {}
        place = [one.name for one in layout.inputs].index(SOUND) + 1
        rows = sum(layout.filled(size.sound) for size in sizes)
        own = {
            "latent_TC": (common_dtype(s.dtypes[place] for s in sizes), rows, layout.sound.width),
            "position_TA": (torch.float32, rows, 1),
            **dict.fromkeys(("segment_T", "level_row_T"), (torch.int64, rows)),
            **dict.fromkeys(("is_real_T", "is_target_T"), (torch.bool, rows)),
        }
        return {f"{cls._PREFIX}{name}": shape for name, shape in own.items()}

    def add(self, latent_KA: Tensor | None) -> None:
        """Writes the sound [K, A] of the next sample; `latent_KA` is None if it has no sound."""
        frames, first = 0 if latent_KA is None else latent_KA.shape[1], self._starts[-1]
        rows = slice(first, first + self._layout.filled(frames))
        tensors, sample = {n: t[rows] for n, t in self._tensors.items()}, len(self._lengths)
        for name in ("latent_TC", "position_TA"):
            tensors[name][frames:] = 0
        if latent_KA is not None:
            tensors["latent_TC"][:frames] = latent_KA.T
            tensors["position_TA"][:frames, 0] = torch.arange(frames)
        for name, value in (("segment_T", sample), ("level_row_T", sample), ("is_real_T", False)):
            tensors[name].fill_(value)
        tensors["is_real_T"][:frames] = True
        tensors["is_target_T"].copy_(tensors["is_real_T"])
        self._lengths.append(frames)
        self._starts.append(rows.stop)

    def finish(self) -> TokenStream:
        """The token stream of all sounds that were added."""
        clean = self._layout.clean_sound_level
        counts = (0,) * len(self._lengths)
        return TokenStream(
            **{name: tensor[: self._starts[-1]] for name, tensor in self._tensors.items()},  # type: ignore[arg-type]
            grids=tuple((frames, 1, 1) for frames in self._lengths),
            starts=tuple(self._starts),
            share=WHOLE,
            methods=by_type(None if clean is None else CleanTokens(level=clean, counts=counts)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Added:
    """Sizes of a sample that was written to the pack."""

    key: str
    caption: str
    fps: float
    grids: tuple[Grid, ...]
    """Grid of the target, then grids of its references."""
    padded: int
    """Number of the sample's tokens, padding included."""
    clean: int
    """Number of clean tokens (of given frames) at the beginning of the target."""
