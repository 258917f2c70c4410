"""The samples of our shards, and of DFM's, by number in the order of the shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath

from dit.data.datasets import DatasetSplit, check_folder, count_samples, shards_of
from dit.data.export.samples import EXPORTED, NumberedSamples, StoredSample, of_card
from dit.data.preflight import read_data_card
from dit.data.records import RecordHeader, head_length, is_dfm, read_outline, read_record
from dit.data.tar_reader import OpenShards, SampleLocation, sample_members, split_name
from dit.parsing import parse_json

_STRIDE = 8  # pixels along a side of a latent cell, where neither sample nor card say it
_LARGE = 2**17  # more than the head of any tensors has


class ShardSamples(NumberedSamples):
    """All samples of one split of a dataset folder.

    Raises:
        DataError: the folder is no dataset, has no such split, or a sample cannot be read; the
            message names its key and shard. Nothing is left out.
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
        """Without open files, which another process opens again."""
        return self.__dict__ | {"_open": OpenShards()}

    def _shard_of(self, index: int) -> tuple[int, int]:
        """Number of the shard, and of the sample in it."""
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return shard, int(index - self._firsts[shard])

    def _pixels(self, about: Mapping[str, Any], name: str, cells: int) -> int:
        value = about.get(name)
        return value if type(value) is int and value > 0 else cells * self._stride


def _parts(place: SampleLocation, *, whole: bool = True) -> tuple[str, dict[str, Any]]:
    """Key and parts of a record; unless `whole`, the RecordHeader of its `.safetensors` alone.

    Raises:
        NotPlain: its tar has unusual headers.
        OSError: it cannot be read.
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
