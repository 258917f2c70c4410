"""Writes the samples of a packed dataset in the formats of other tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.formats.automodel import held_by, write_automodel
from data_prep.formats.cached_samples import (
    CachedSample,
    read_shards,
)
from data_prep.formats.dfm import HELD, form_of, is_raw, write_dfm
from data_prep.formats.parquet import HELD as OF_PARQUET
from data_prep.formats.parquet import write_parquet
from data_prep.refusals import PrepError
from dit.codecs.dataset_card import part_of_card, read_card
from dit.codecs.normalization import Whitening
from dit.codecs.vae import codec_named
from dit.token_ids import TOKEN_IDS

_ROWS_IN_FILE = 64
_OF_LOSS = ("loss_weight",)  # values in a sample's .json, beside its tensors


class ExportedSamples(NamedTuple):
    """The number of samples written in another tool's format, and what the format cannot hold."""

    samples: int
    left_out: Counter[str]
    """Name of a tensor or value that the format cannot hold -> number of samples that have it."""


def export(folder: Path, *, form: str, shard_size: int) -> ExportedSamples:
    """Writes the samples of the dataset in `folder` again, beside its shards, in the format `form`.

    `form` is a value of --output_format: dfm, parquet, meta or pt.

    Raises:
        PrepError: the folder is not a dataset.
        CodecError: the dataset has no card that can be read.
    """
    card, left_out = read_card(folder), Counter[str]()
    if form == "dfm":
        samples = _export_dfm(folder, card, left_out, shard_size=shard_size)
    elif form == "parquet":
        samples = write_parquet(
            _counted(read_shards(folder), OF_PARQUET, left_out),
            folder,
            rows_in_file=_ROWS_IN_FILE,
            whitening=_whitening_of(card),
        )
    else:
        made_by = card["processor"]
        model = {"processor": made_by["name"], "model_name": made_by.get("model_name")}
        model["model_type"] = made_by["name"]
        # Texts are padded to the limit of the encoder, or to the longest one.
        longest = card["text_encoder"].get("max_length")
        longest = longest or max((len(r.tensors["text"]) for r in read_shards(folder)), default=0)
        samples = write_automodel(
            _counted(read_shards(folder), partial(held_by, model=made_by["name"]), left_out),
            folder,
            ending=form,
            shard_size=shard_size,
            model=model,
            text_length=longest,
        )
    return ExportedSamples(samples, left_out)


def _export_dfm(
    folder: Path, card: dict[str, Any], left_out: Counter[str], *, shard_size: int
) -> int:
    codec = codec_named(part_of_card(card, "processor")["name"])
    first = next(read_shards(folder), None)
    form = form_of(codec, () if first is None else first.tensors)
    return write_dfm(
        _counted(read_shards(folder), HELD[form], left_out),
        folder,
        shard_size=shard_size,
        form=form,
        whitening=_whitening_of(card) if is_raw(form, codec) else None,
    )


def _counted(
    records: Iterable[CachedSample],
    held: Container[str] | Callable[[CachedSample], Container[str]],
    left_out: Counter[str],
) -> Iterator[CachedSample]:
    """Yields `records` unchanged, and counts in `left_out` what the format cannot hold.

    `held` has the names of the tensors and values that it can hold, or is a function that returns
    these names for a record.

    Raises:
        PrepError: a record has token ids, without which its text cannot be used.
    """
    for record in records:
        if TOKEN_IDS in record.tensors:
            raise PrepError(
                f"sample {record.key} has `{TOKEN_IDS}`, which its network needs to read the text,"
                " and no format of another tool can store them; leave --output_format out"
            )
        place = held(record) if callable(held) else held
        names = [*record.tensors, *(name for name in _OF_LOSS if name in record.about)]
        left_out.update(name for name in names if name not in place)
        yield record


def _whitening_of(card: dict[str, Any]) -> Whitening | None:
    """The latents' whitening that the dataset's `card` records.

    The result is None for codecs whose whitening is measured on each dataset, because the formats
    of other tools cannot hold it.

    Raises:
        CodecError: the card names no known codec.
    """
    if codec_named(part_of_card(card, "processor")["name"]).whitens_by_dataset:
        return None
    latent = part_of_card(card, "latent")
    return Whitening(mean=tuple(latent["mean"]), std=tuple(latent["std"]))
