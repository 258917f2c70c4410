"""Energon's reader of whole samples, for what is not plain, without its trust in tar headers.

It takes any size that a header gives: one of a sparse member asks for terabytes of zeros, and one
below zero leads back to the same header for ever.
"""

from __future__ import annotations

import tarfile
from bisect import bisect_right
from typing import Any, Self

from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader

_OF_ENERGON = {"__key__", "__shard__", "__restore_key__", "__sources__"}


class _Member(tarfile.TarInfo):
    """A member that lies within its sample."""

    def _proc_member(self, tar: Any) -> Self:  # what tarfile calls for every header that it reads
        self._check(tar)
        member = super()._proc_member(tar)  # type: ignore[misc]  # typeshed does not know it
        member._check(tar)  # an extended header may have said another size
        return member

    def _check(self, tar: Any) -> None:
        if self.issparse() or not 0 <= self.size <= tar.sample_end - self.offset:
            what = "sparse" if self.issparse() else f"of {self.size} bytes"
            raise tarfile.ReadError(f"member {self.name!r} is {what}, beyond the end of its sample")


def read_whole(reader: ShardInfosITarReader, index: int) -> dict[str, Any] | None:
    """The record of a sample, None where the split excludes it.

    Raises:
        ValueError: a part has the name of one of Energon's own entries.
        Exception: of many kinds, for a damaged tar or index.
    """
    shard = bisect_right(reader.shard_count_cumsum, index) - 1
    place = reader._get_itar_sample_pointer(index)
    tar: Any = reader._get_itarfile_cached(reader.shard_tar_file_idxs[shard])
    tar.tarinfo, tar.sample_end = _Member, place.byte_offset + place.byte_size
    record: Any = reader[index]
    if record is None:
        return None
    if odd := [name for name in record if name.startswith("__") and name not in _OF_ENERGON]:
        raise ValueError(f"a file of the sample has the extension {odd[0]!r}")
    # Bytes that are no UTF-8 come as halves of surrogate pairs, which no file or log takes.
    name = record["__key__"].encode(errors="surrogateescape").decode(errors="backslashreplace")
    return {**record, "__key__": name}
