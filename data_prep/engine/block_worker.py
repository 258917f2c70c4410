"""Turns a block of planned samples into the files of these samples; runs in worker processes.

Threads decode the next block while this one is encoded (Pillow and FFmpeg release the GIL).
Samples of the same shape are encoded as a batch.
"""

# C latent channels, F frames, H rows, W columns

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import torch

from data_prep.inspect.duplicates import Looks, looks_of
from data_prep.inspect.html_pages import (
    Thumbnail,
    beside_rejected,
    frames_shown,
    seconds_of,
    thumbnail,
    with_controls,
)
from data_prep.media.clips import REJECTED_LATENT, Clip, Entry, Source
from data_prep.media.images import to_levels, to_rgb
from data_prep.refusals import Reason, RefusedError
from data_prep.writing.tar_shards import sample_parts
from dit.codecs.dataset_card import FORMAT_VERSION
from dit.codecs.normalization import Moments
from dit.codecs.sound import SoundCodec, sound_part
from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec
from dit.codecs.vae.autoencoder import picture_of
from dit.codecs.vae.codec import LATENT_DTYPE

Block = tuple[bytes | None, ...]  # lines of the plan; None for a sample that needs no work


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """The files of one sample for a shard, and the facts about it that the ledger keeps."""

    parts: dict[str, bytes]
    size: tuple[int, int, int]  # frames, height, width in pixels
    notes: tuple[str, ...]
    moments: tuple[int, float, float]  # count, mean and mean square of the latent's values
    psnr: float | None = None  # dB, decoded latent against the source


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedResult:
    """The reason why a sample cannot be packed, with details."""

    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSample:
    """Moments (counts and sums) of a sample's latents, to measure the dataset's whitening."""

    video: Moments | None
    sound: Moments | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedSample:
    """Perceptual hashes and thumbnail of a decoded sample, and notes that the plan counts."""

    looks: Looks | None  # None if the sample has too little structure to be compared
    thumbnail: Thumbnail | None  # None if the page has no room for more pictures
    notes: tuple[str, ...]


class Task(StrEnum):
    """What a worker does with a block of samples; its value is shown beside the progress bar."""

    DECODE = "decoding"
    MEASURE = "reading"
    ENCODE = "packing"


@dataclass(frozen=True, kw_only=True)
class BlockWorker:
    """Decodes, measures or encodes blocks of the plan; it is pickled for worker processes."""

    source: Source
    codec: Codec
    text: TextEncoder
    sound: SoundCodec | None = None
    task: Task = Task.ENCODE
    batch_size: int = 1
    """Samples of one shape that are encoded together."""
    verify: bool = False
    """Whether each latent is decoded again and compared with its source by PSNR."""
    decode_threads: int = 0
    """Threads that decode the next block; 0 decodes each sample when it is encoded."""
    side: int = 128
    """Longer side, in pixels, of the thumbnails of decoded samples."""

    def on(self, device: str) -> Self:
        """A copy of this worker with its models on `device`; itself if its task is to decode."""
        if self.task is Task.DECODE:
            return self
        sound = self.sound and self.sound.on(device)
        return replace(self, codec=self.codec.on(device), text=self.text.on(device), sound=sound)

    def run(self, blocks: Iterable[Block]) -> Iterator[list[Any]]:
        """Yields a list of results for each of `blocks`, one result for each line of the block.

        A result is a `RefusedResult` or, depending on `task`, an `EncodedSample`, a
        `MeasuredSample` or a `DecodedSample`.

        If threads decode ahead, the next block is requested before the current one is finished.
        An item None in `blocks` makes the worker finish all blocks that it has begun.
        """
        ahead = 1 if self.decode_threads else 0
        pending: deque[list[Callable[[], Clip] | RefusedResult | None]] = deque()
        with ThreadPoolExecutor(max(1, self.decode_threads)) as pool:
            for block in blocks:
                if block is not None:
                    pending.append([self._start(line, pool) for line in block])
                while pending and (len(pending) > ahead or block is None):
                    yield self._finish(pending.popleft())
            while pending:
                yield self._finish(pending.popleft())

    def _start(self, line: bytes | None, pool: ThreadPoolExecutor) -> Any:
        if line is None:
            return None
        entry = Entry.from_line(line)
        if entry.refused:
            return RefusedResult(reason=entry.refused, detail=entry.detail)
        if self.decode_threads:
            return entry, pool.submit(self.source.read, entry)
        return entry, None

    def _clip(self, entry: Entry, future: Future[Clip] | None) -> Clip | RefusedResult:
        try:
            return self.source.read(entry) if future is None else future.result()
        except RefusedError as refused:
            return RefusedResult(reason=str(refused.reason), detail=refused.detail)

    def _finish(self, started: list[Any]) -> list[Any]:
        results = list(started)
        shapes: dict[Any, list[int]] = {}
        clips: dict[int, Clip] = {}
        for index, item in enumerate(started):
            if not isinstance(item, tuple):
                continue
            clip = self._clip(*item)
            if isinstance(clip, RefusedResult):
                results[index] = clip
            elif self.task is Task.DECODE:
                results[index] = self._decoded(clip)
            elif self.task is Task.MEASURE:
                results[index] = self._measured(clip)
            else:
                clips[index] = clip
                same = shapes.setdefault(tuple(clip.video_CFHW.shape), [])
                same.append(index)
                if len(same) == self.batch_size:
                    self._encode(started, clips, shapes.pop(tuple(clip.video_CFHW.shape)), results)
        for same in shapes.values():
            self._encode(started, clips, same, results)
        return results

    def _measured(self, clip: Clip) -> MeasuredSample:
        video, sound = None, None
        if self.codec.whitens_by_dataset:
            video = self.codec.measure(clip.video_CFHW)
        if self.sound is not None and self.sound.scales_by_dataset and clip.sound_CS is not None:
            sound = self.sound.measure(clip.sound_CS)
        return MeasuredSample(video=video, sound=sound)

    def _decoded(self, clip: Clip) -> DecodedSample:
        frames = clip.video_CFHW.shape[1]
        controls = map(to_levels, clip.references)
        shown_FHW3 = with_controls(to_levels(clip.video_CFHW[:, frames_shown(frames)]), controls)
        if clip.rejected_CFHW is not None:
            shown_FHW3 = beside_rejected(shown_FHW3, to_levels(clip.rejected_CFHW))
        seconds = seconds_of(frames, clip.fps)
        shown = thumbnail(shown_FHW3, side=self.side, seconds=seconds)
        if self.sound is not None and clip.sound_CS is not None:
            shown = shown.with_sound(clip.sound_CS.numpy(), self.sound.rate)
        return DecodedSample(
            # [F, H, W], the first frame and the last, in grey
            looks=looks_of(clip.video_CFHW[:, [0, -1]].mean(0)),
            thumbnail=shown,
            notes=clip.notes,
        )

    def _encode(
        self, started: list[Any], clips: dict[int, Clip], batch: list[int], results: list[Any]
    ) -> None:
        """Encodes a batch of samples into `results` in place, and drops their clips from `clips`.

        `batch` has the samples' indices in the block. `started` and `results` have an entry for
        each sample of the block, `clips` one for each decoded sample that is not encoded yet.
        """
        videos = [clips[index].video_CFHW for index in batch]
        tensors = self.codec.encode_batch(videos, keys=[started[i][0].key for i in batch])
        for index, of_video in zip(batch, tensors, strict=True):
            entry, clip = started[index][0], clips.pop(index)
            try:
                results[index] = self._packed(entry, clip, of_video)
            except RefusedError as refused:
                results[index] = RefusedResult(reason=str(refused.reason), detail=refused.detail)

    def _packed(self, entry: Entry, clip: Clip, tensors: dict[str, torch.Tensor]) -> EncodedSample:
        """Encodes the references, caption and sound of a sample, and serialises all for its shard.

        `tensors` is the codec's output for the clip, by name, with `latent` [C, F, H, W].

        Raises:
            RefusedError: a tensor is not finite, or the text encoder cannot read the sample's
                pictures.
        """
        latent_CFHW, origins = tensors["latent"], dict[str, str]()
        for number, reference_CFHW in enumerate(clip.references):
            name = f"reference_latent_{number}"
            tensors = {**tensors, name: self.codec.encode(reference_CFHW)}
            origins[name] = entry.references[number].name
        if clip.rejected_CFHW is not None:
            assert entry.rejected is not None
            tensors = {**tensors, REJECTED_LATENT: self.codec.encode(clip.rejected_CFHW)}
            origins[REJECTED_LATENT] = entry.rejected.name
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                origin = origins.get(name, entry.source)
                made = f"processor {self.codec.name} made {name} from {origin}"
                raise RefusedError(Reason.NOT_FINITE, made)
        values = latent_CFHW.double()
        mean, square = float(values.mean()), float(values.square().mean())
        if clip.loss_mask_1FHW is not None:
            assert clip.loss_mask_1FHW.shape[1:] == latent_CFHW.shape[1:], "cells of another size"
            tensors = {**tensors, "loss_mask": clip.loss_mask_1FHW.to(LATENT_DTYPE)}
        everything = {**tensors, **self._texts(entry, clip)}
        sound_KA = None
        if self.sound is not None and clip.sound_CS is not None:
            sound_KA = self.sound.encode(clip.sound_CS)
        _, frames, height, width = clip.video_CFHW.shape
        return EncodedSample(
            parts=sample_parts(everything, self._description(entry, clip), sound_KA),
            size=(frames, height, width),
            notes=(*clip.notes, *self.text.notes_on(clip.caption)),
            moments=(values.numel(), round(mean, 9), round(square, 9)),
            psnr=self._psnr(latent_CFHW, clip) if self.verify else None,
        )

    def _texts(self, entry: Entry, clip: Clip) -> dict[str, torch.Tensor]:
        """Text embeddings of the sample's caption by name, as the text encoder returns them.

        Some text encoders read pictures together with the caption: the first frame, or the
        references.

        Raises:
            RefusedError: the sample has no reference, or more than the text encoder can read.
        """
        if self.text.sees_first_frame:
            return self.text.encode_beside(clip.caption, [picture_of(clip.video_CFHW[:, 0])])
        most, found = self.text.most_pictures, len(entry.references)
        if not most or (not found and self.text.reads_alone):
            return self.text.encode_all(clip.caption)
        named = f"text encoder {self.text.name} reads a caption with"
        if not found:
            raise RefusedError(
                Reason.NO_REFERENCE,
                f"{named} a control picture, and this file has none; give --control_dir",
            )
        if found > most:
            raise RefusedError(
                Reason.BAD_REFERENCE,
                f"{named} at most {most} pictures, and this file has {found}; leave some out",
            )
        shown = clip.originals if self.text.sees_alpha else [*map(to_rgb, clip.originals)]
        return self.text.encode_beside(clip.caption, shown)

    def _psnr(self, latent_CFHW: torch.Tensor, clip: Clip) -> float:
        """Peak signal-to-noise ratio of the decoded latent against its 8-bit source, in dB.

        The result is at most 99 dB, also for equal pictures.
        """
        found_FHWC = self.codec.decode(latent_CFHW).float()
        source_FHWC = torch.from_numpy(to_levels(clip.video_CFHW)).float()
        error = (found_FHWC - source_FHWC).square().mean().item()
        return round(10 * math.log10(255**2 / error), 2) if error > 1e-4 else 99.0

    def _description(self, entry: Entry, clip: Clip) -> dict[str, Any]:
        _, frames, height, width = clip.video_CFHW.shape
        more: dict[str, Any] = {}
        if entry.loss_weight is not None:
            more["loss_weight"] = entry.loss_weight
        if entry.rejected is not None:
            more["rejected"] = entry.rejected.name
        if entry.references:
            more["references"] = [one.name for one in entry.references]
        if self.sound is not None and clip.sound_CS is not None:
            more[sound_part.ABOUT] = sound_part.about_sound(self.sound, clip.sound_CS)
        return {
            "format_version": FORMAT_VERSION,
            "caption": clip.caption,
            "source": entry.source,
            "original_height": clip.original_height,
            "original_width": clip.original_width,
            "height": height,
            "width": width,
            "num_frames": frames,
            "fps": clip.fps,
            "processor": self.codec.name,
            "text_encoder": self.text.name,
            "text_encoder_revision": self.text.revision,
            "latent_mean": self.codec.whitening.mean,
            "latent_std": self.codec.whitening.std,
            **more,
        }
