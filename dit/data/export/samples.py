"""Samples of a folder as dicts, by index: NumberedSamples, and ShardSamples for dataset folders.

A sample is a dict: `key`, `caption`, `fps` (None for a picture), `width` and `height` in pixels,
`bucket` (the number of its SizeBucket), `about` (all of its description), `latent` [C, F, H, W],
`text` [L, E], and the tensors of EXPORTED that the folder has. Tensors have their stored dtypes.
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from torch.utils.data import Dataset

from dit.batch import TEXT
from dit.data.datasets import DatasetSplit, check_folder, count_samples, shards_of
from dit.data.preflight import read_data_card
from dit.data.records import (
    LATENT,
    LOSS_MASK,
    ShardRecord,
    head_length,
    is_dfm,
    read_outline,
    read_record,
)
from dit.data.rejections import DataError, SampleRefused
from dit.data.tar_reader import NotPlain, OpenShards, SampleLocation, sample_members, split_name
from dit.models.family import InputKind
from dit.parsing import parse_json
from dit.stored_samples import RecordHeader
from dit.token_ids import TOKEN_IDS

EXPORTED: Mapping[str, InputKind] = {
    TEXT: InputKind.TEXT,
    "pooled_text": InputKind.VECTOR,
    "text_2": InputKind.TEXT,
    "null_text": InputKind.NULL_TEXT,
    "image_embed": InputKind.TEXT,
    "first_frame_latent": InputKind.FRAMES,
    "condition_latent": InputKind.CHANNELS,
    **{f"reference_latent_{number}": InputKind.REFERENCE for number in range(4)},
}
"""Name of a tensor in shards -> its kind; without latent and loss mask."""
_STRIDE = 8  # pixels along a side of a latent cell, if neither the sample nor the card states it
_LARGE = 2**17  # more than the head of any tensors has
_FAULTS = (SampleRefused, NotPlain, OSError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SizeBucket:
    """What samples must have in common to be stacked: size, latent shape, names of tensors."""

    width: int  # pixels, as encoded
    height: int
    latent: tuple[int, ...]  # C, F, H, W
    names: tuple[str, ...]  # of the tensors beside the latent

    @property
    def pixels(self) -> int:
        return self.width * self.height


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample:
    """A sample as read from a folder; or its outline, with tensors on the device `meta`."""

    key: str
    record: ShardRecord
    about: Mapping[str, Any]
    size: tuple[int, int]  # width and height in pixels, as encoded
    text_rows: int  # rows of the stored text, padding included


class NumberedSamples(Dataset[dict[str, Any]]):
    """All samples of a folder as a torch dataset; a subclass reads them.

    The outline of every sample is read at the start, and a whole sample on demand.

    Raises:
        DataError: a sample cannot be read; the message names it. No sample is skipped.
    """

    remedy = ""
    """End of the error message for a sample that cannot be read."""

    def __init__(self, folder: Path | str, *, count: int, card: Mapping[str, Any]):
        self.folder, self.card = Path(folder), card
        self.buckets: list[SizeBucket] = []
        """Buckets in the order of their first samples."""
        self.bucket_of = np.empty(count, np.int32)
        self.longest_text = 0
        self.fingerprint = ""
        """Hash of the keys and descriptions of all samples in order."""
        self._read_outlines()

    def read(self, index: int, *, whole: bool) -> StoredSample:
        """Sample number `index`; unless `whole`, its tensors may be on the device `meta`."""
        raise NotImplementedError

    def name_of(self, index: int) -> str:
        """Where sample `index` is in the data, for messages."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.bucket_of)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]  # as lists count, from the end too
        found = self._read(index, whole=True)
        record, mask = found.record, found.record.loss_mask_1FHW
        return {
            "key": found.key,
            "caption": record.caption,
            "fps": None if math.isnan(record.fps) else record.fps,
            "width": found.size[0],
            "height": found.size[1],
            "bucket": int(self.bucket_of[index]),
            "about": found.about,
            LATENT: record.latent_CFHW,
            **record.inputs,
            **({} if mask is None else {LOSS_MASK: mask}),
        }

    def _read_outlines(self) -> None:
        numbers, seen = dict[SizeBucket, int](), 0
        for index in range(len(self)):
            found = self._read(index, whole=False)
            masked = found.record.loss_mask_1FHW is not None
            bucket = SizeBucket(
                width=found.size[0],
                height=found.size[1],
                latent=tuple(found.record.latent_CFHW.shape),
                names=(*sorted(found.record.inputs), *((LOSS_MASK,) if masked else ())),
            )
            self.bucket_of[index] = numbers.setdefault(bucket, len(numbers))
            self.longest_text = max(self.longest_text, found.text_rows)
            seen = zlib.crc32(f"{found.key}\0{found.about}".encode(errors="replace"), seen)
        self.buckets, self.fingerprint = list(numbers), f"{seen:08x}"

    def _read(self, index: int, *, whole: bool) -> StoredSample:
        try:
            return self.read(index, whole=whole)
        except _FAULTS as error:
            what = error.detail if isinstance(error, SampleRefused) else error
            raise DataError(f"{self.name_of(index)}: {what}; {self.remedy}") from error


def of_card(card: Mapping[str, Any], part: str, name: str) -> Any:
    """The entry `name` in the section `part` of the dataset card; None if there is none."""
    entries = card.get(part)
    return entries.get(name) if isinstance(entries, Mapping) else None


class ShardSamples(NumberedSamples):
    """All samples of one split of a dataset folder.

    Raises:
        DataError: the folder is no dataset, has no such split, or a sample cannot be read; the
            message names its key and shard. No sample is skipped.
    """

    def __init__(self, folder: Path | str, *, split: str = "train"):
        leaf = DatasetSplit(path=EPath(str(folder)), split=split)
        check_folder(leaf.path)
        count, card = count_samples(leaf), read_data_card(leaf) or {}
        stride = of_card(card, "latent", "stride")
        self._stride = stride if type(stride) is int and stride > 0 else _STRIDE
        shards = shards_of(leaf)
        self._paths = [str(shard.path.local_path()) for shard in shards]
        self._firsts = np.cumsum([0, *(shard.count for shard in shards)])
        self._open = OpenShards()
        self.remedy = (
            f"`python -m data_prep inspect {folder}` lists what is damaged, and other trainers need"
            " every sample: restore the shard or pack the data again"
        )
        super().__init__(folder, count=count, card=card)

    def read(self, index: int, *, whole: bool) -> StoredSample:
        shard, number = self._shard_of(index)
        path = self._paths[shard]
        start, size = self._open.span(path, number)
        place = SampleLocation(shards=self._open, path=path, start=start, size=size)
        key, parts = _parts(place, whole=whole)
        read = read_record if whole or is_dfm(parts) else read_outline
        record, about = read(parts, EXPORTED), parse_json(parts["json"])
        if TOKEN_IDS in record.unknown:
            raise ValueError(
                f"the sample has `{TOKEN_IDS}`, which its network needs to read the text, and which"
                " other trainers cannot take: train on these shards with this project"
            )
        _, _, rows, columns = record.latent_CFHW.shape
        return StoredSample(
            key=key,
            record=record,
            about=about,
            size=(self._pixels(about, "width", columns), self._pixels(about, "height", rows)),
            text_rows=0 if record.text_LE is None else len(record.text_LE),
        )

    def name_of(self, index: int) -> str:
        shard, number = self._shard_of(index)
        return f"{self._paths[shard]}, sample {number}"

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle for another process, which opens the files itself."""
        return self.__dict__ | {"_open": OpenShards()}

    def _shard_of(self, index: int) -> tuple[int, int]:
        """(index of the shard that holds sample `index`, index of the sample in it)."""
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return shard, int(index - self._firsts[shard])

    def _pixels(self, about: Mapping[str, Any], name: str, cells: int) -> int:
        value = about.get(name)
        return value if type(value) is int and value > 0 else cells * self._stride


def _parts(place: SampleLocation, *, whole: bool = True) -> tuple[str, dict[str, Any]]:
    """(key, parts by extension) of the record at `place`.

    Unless `whole`, the part `safetensors` is a RecordHeader instead of bytes.

    Raises:
        NotPlain: the tar has unusual headers.
        OSError: the shard cannot be read.
    """
    parts, key = dict[str, Any](), ""
    for name, at, size in sample_members(place.read, place.size):
        key, extension = split_name(name)
        if whole or extension != "safetensors":
            parts[extension] = place.read(at, size)
        else:
            length = head_length(place.read(at, min(8, size)))
            parts[extension] = RecordHeader(
                data=place.read(at, min(length, size, _LARGE)), size=size
            )
    return key, parts
