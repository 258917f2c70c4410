"""Caches of other tools -> our shards, and our shards -> caches of other tools."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from data_prep import processors
from data_prep.cards import FORMAT_VERSION, read_card
from data_prep.folder import REFUSED_NAME, make_ready, publish
from data_prep.formats.automodel import INDEX, read_automodel, write_automodel
from data_prep.formats.dfm import read_dfm, write_dfm
from data_prep.formats.parquet import read_parquet, write_parquet
from data_prep.formats.records import Record, read_shards
from data_prep.processors.processor import LATENT_DTYPE, Processor
from data_prep.refusals import PrepError, Refusals, RefusedError
from data_prep.shards import ShardSeries, sample_parts
from data_prep.splits import Split, SplitFractions

FORMATS = ("meta", "pt", "parquet", "dfm")
_ROWS_IN_FILE = 64


def export(folder: Path, *, form: str, shard_size: int) -> int:
    """Writes the samples of a dataset of ours beside its shards, in the form of another tool.

    Raises:
        PrepError: the folder is no dataset of ours.
    """
    records = read_shards(folder)
    if form == "parquet":
        return write_parquet(records, folder, rows_in_file=_ROWS_IN_FILE)
    if form == "dfm":
        return write_dfm(records, folder, shard_size=shard_size)
    card = read_card(folder)
    processor = card["processor"]
    model = {"processor": processor["name"], "model_name": processor.get("model_name")}
    model["model_type"] = processor["name"]
    return write_automodel(records, folder, ending=form, shard_size=shard_size, model=model)


def records_of(folder: Path) -> Iterator[Record | RefusedError]:
    """The samples of another tool's cache, told apart by what the folder holds.

    Raises:
        PrepError: it is none that is known.
    """
    if (folder / INDEX).exists():
        return read_automodel(folder)
    if next(folder.rglob("*.parquet"), None) is not None:
        return read_parquet(folder)
    if next(folder.rglob("*.tar"), None) is not None:
        return read_dfm(folder)
    raise PrepError(
        f"{folder} holds no cache that is known: metadata.json of AutoModel, *.parquet of"
        " FastVideo, or *.tar of DFM"
    )


def convert(args: Namespace) -> tuple[Counter[str], Refusals]:
    """Writes a cache of another tool to our shards.

    Raises:
        PrepError: it cannot be read, or too much of it was refused.
    """
    split = SplitFractions.parse(args.split)
    processor = _processor(args)
    make_ready(args.output_dir, overwrite=args.overwrite)
    refusals, total, widths = Refusals(), 0, dict[str, int]()
    with ExitStack() as stack:
        series = {
            part: stack.enter_context(
                ShardSeries(
                    args.output_dir / part,
                    max_samples=args.shard_size,
                    max_bytes=args.max_shard_bytes,
                )
            )
            for part in Split
        }
        for record in records_of(args.folder):
            total += 1
            if isinstance(record, RefusedError):
                refusals.add(record.detail.split(":")[0], str(record.reason), record.detail)
                continue
            parts, shapes = _parts(record, processor if args.latents == "raw" else None)
            widths |= shapes
            series[split.split_of(record.key)].write(record.key, parts)
    refusals.write(args.output_dir / REFUSED_NAME)
    refusals.check(total=total, max_fraction=args.max_bad_fraction)
    shards = {part: one.counts for part, one in series.items() if one.counts}
    card = _card(args, processor, widths, shards, refusals)
    null_text = {"text": torch.zeros(1, widths["text"], dtype=torch.bfloat16)}
    publish(args.output_dir, shards=shards, card=card, null_text=null_text)
    counts = {part: sum(found.values()) for part, found in shards.items()}
    return Counter({str(part): count for part, count in counts.items()}), refusals


def _processor(args: Namespace) -> Processor | None:
    if args.processor is None:
        if args.latents == "raw":
            raise PrepError("--latents raw needs --processor, whose normalisation it lacks")
        return None
    return processors.named(args.processor).from_arguments(args)


def _parts(
    record: Record, whitened_by: Processor | None
) -> tuple[dict[str, bytes], dict[str, int]]:
    latent_CFHW = record.tensors["latent"]
    if whitened_by is not None:
        latent_CFHW = whitened_by.whitening.apply(latent_CFHW)
    tensors = {**record.tensors, "latent": latent_CFHW.to(LATENT_DTYPE)}
    tensors["text"] = tensors["text"].to(torch.bfloat16)
    about = {"format_version": FORMAT_VERSION, **record.about}
    shapes = {"channels": latent_CFHW.shape[0], "text": tensors["text"].shape[1]}
    return sample_parts(tensors, about), shapes


def _card(
    args: Namespace,
    processor: Processor | None,
    widths: dict[str, int],
    shards: dict[Split, dict[str, int]],
    refusals: Refusals,
) -> dict[str, Any]:
    """Without --processor nobody knows the codec, and pictures cannot be decoded."""
    codec = {"name": processor.name, **processor.settings} if processor else {"name": "unknown"}
    whitening = processor.whitening if processor else None
    return {
        "format_version": FORMAT_VERSION,
        "processor": codec,
        "text_encoder": {"name": "unknown", "width": widths["text"]},
        "latent": {
            "channels": widths["channels"],
            "dtype": str(LATENT_DTYPE).removeprefix("torch."),
            "mean": whitening.mean if whitening else [],
            "std": whitening.std if whitening else [],
        },
        "splits": {
            str(part): {"samples": sum(counts.values()), "shards": len(counts)}
            for part, counts in shards.items()
        },
        "sources": [args.folder.resolve().name],
        "refused": refusals.counts,
        "settings": json.loads(json.dumps({"split": args.split, "latents": args.latents})),
        "license": None,
    }
