"""Converts the cache of another tool to our shards."""

# C latent channels, F H W frames, rows, columns

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_prep.formats.automodel import INDEX, index_of, read_automodel
from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    tars_below,
)
from data_prep.formats.dfm import holds_raw_latents, read_dfm
from data_prep.formats.mlperf import holds_mlperf, link_shards, null_texts, read_mlperf
from data_prep.formats.mlperf import whitening as whitening_of_mlperf
from data_prep.formats.parquet import read_parquet
from data_prep.planning.splits import DEFAULT_SPLIT, Split, SplitFractions, all_in_train_notice
from data_prep.refusals import PrepError, Reason, Refusals
from data_prep.writing.dataset_folder import LEDGER, REFUSED_NAME, prepare_folder, publish, remove
from data_prep.writing.readme import MadeBy
from data_prep.writing.tar_shards import ShardSeries, sample_parts
from dit.codecs import text
from dit.codecs.dataset_card import FORMAT_VERSION
from dit.codecs.encoder_options import EncoderPadding
from dit.codecs.text.pretrained_encoder import UnmaskedTextEncoder
from dit.codecs.vae import codec_named
from dit.codecs.vae.codec import DISTRIBUTION, DISTRIBUTION_DTYPE, LATENT_DTYPE, Codec
from dit.stored_samples import uneven_levels

# Latents of these codecs are stored by FastVideo normalised (Cosmos25WanVAEWrapper) or not (its
# overfit script).
_OF_BOTH_KINDS = ("cosmos_predict25",)
_IN_HALF = ("latent", "first_frame_latent", "condition_latent", "image_embed")
_TEXTS = ("text", "text_2", "pooled_text")
_DTYPES: dict[str, torch.dtype] = {
    **dict.fromkeys(_IN_HALF, LATENT_DTYPE),
    **dict.fromkeys(_TEXTS, torch.bfloat16),
}
"""Name of a tensor in our shards -> its dtype there, unless latents are distributions."""


def records_of(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Yields the samples of the cache in `folder`, or their refusals.

    The format of the cache is recognised by the names of its files.

    Raises:
        PrepError: the folder holds no known cache.
    """
    if (folder / INDEX).exists():
        return read_automodel(folder)
    if _is_parquet(folder):
        return read_parquet(folder)
    if holds_mlperf(folder):
        return read_mlperf(folder)
    if tars_below(folder):
        return read_dfm(folder)
    raise PrepError(
        f"{folder} holds no known cache: neither metadata.json of AutoModel, nor *.parquet of"
        " FastVideo, nor *.tar of DFM or MLPerf; give the folder that one of these wrote"
    )


def _is_parquet(folder: Path) -> bool:
    return not (folder / INDEX).exists() and next(folder.rglob("*.parquet"), None) is not None


def _latents(args: Namespace, codec: Codec | None) -> str:
    """`raw` if the cache's latents still have to be normalised, else `normalised`.

    Raises:
        PrepError: the latents are raw and no --processor says how to normalise them, or neither the
            cache nor --latents says whether they are raw.
    """
    if holds_mlperf(args.folder):
        if args.latents == "raw":
            raise PrepError(
                "--latents raw: latents of MLPerf are normalised by the benchmark's constants;"
                " leave --latents out"
            )
        return "normalised"
    measured = codec is not None and codec.whitens_by_dataset
    if not args.latents and _is_parquet(args.folder) and codec and codec.name in _OF_BOTH_KINDS:
        raise PrepError(
            f"--processor {codec.name}: FastVideo's Parquet of this model holds latents before or"
            " after their normalisation; give --latents normalised where"
            " preprocess_cosmos2_5_t2w.sh made it, and --latents raw where"
            " preprocess_cosmos25_overfit.py or data_prep did"
        )
    # AutoModel normalises latents.
    is_raw = not measured and not (args.folder / INDEX).exists()
    is_raw = is_raw and (_is_parquet(args.folder) or holds_raw_latents(args.folder, codec))
    found = args.latents or ("raw" if is_raw else "normalised")
    if found == "raw" and codec is None:
        raise PrepError(
            "--latents raw: raw latents are normalised as their codec does it; name the codec, such"
            " as --processor wan"
            if args.latents
            else "the Parquet of FastVideo, and DFM's shards of FLUX, hold latents before their"
            " normalisation: name their codec, such as --processor wan or flux, or give --latents"
            " normalised if they are normalised already (as old versions of data_prep wrote them)"
        )
    return found


def convert(args: Namespace) -> tuple[Counter[Split], Refusals, list[str]]:
    """Runs the conversion that `args` describes, from a cache of another tool to our shards.

    Returns the number of samples of each split, the refusals, and sentences that the user should
    read.

    Raises:
        PrepError: the cache cannot be read, options do not fit it, or more than the fraction
            --max_bad_fraction of its samples is refused.
    """
    if not args.folder.is_dir():
        what = "not a folder" if args.folder.exists() else "missing"
        raise PrepError(f"{args.folder} is {what}; give the folder that the other tool wrote")
    of_mlperf = holds_mlperf(args.folder)
    if args.link and not of_mlperf:
        raise PrepError(
            f"--link: {args.folder} holds no *.tar with a sample of MLPerf; give the folder of its"
            " shards, or leave --link out for a cache of another tool"
        )
    # Samples of MLPerf's validation split are recognised by their timestep.
    split = SplitFractions.parse(args.split or ("1,0,0" if of_mlperf else DEFAULT_SPLIT))
    codec = codec_named(args.processor).from_arguments(args) if args.processor else None
    encoder = (
        text.text_encoder_named(args.text_encoder).from_arguments(args)
        if args.text_encoder
        else None
    )
    records = records_of(args.folder)  # first: an error must come before anything is removed
    args.latents = _latents(args, codec)  # stored in the dataset card
    null_text = null_texts(args.folder) if of_mlperf else {}
    begun = _begun(args)
    checked = _CheckedRows()
    shards, refusals = (_linked if args.link else _written)(records, checked, args, codec, split)
    refusals.write(args.output_dir / REFUSED_NAME)
    if not checked.total:
        raise PrepError(
            f"{args.folder} holds no samples; give the folder that the other tool wrote"
        )
    refusals.check(total=checked.total, max_fraction=args.max_bad_fraction, kept=False)
    if uneven := uneven_levels(checked.levels.elements()):
        raise PrepError(f"{uneven}; convert the whole validation set")
    counts = Counter({part: sum(found.values()) for part, found in shards.items()})
    notices = _missing_conditions(args.folder, checked.names)
    empty = () if of_mlperf else split.empty(counts)  # MLPerf publishes each split by itself
    if empty and args.split is None:
        shards = {Split.TRAIN: _moved_to_train(args.output_dir, shards)}
        counts = Counter({Split.TRAIN: counts.total()})
        notices.append(all_in_train_notice(counts))
    elif empty:
        lost = f"leaves {' and '.join(empty)} without a sample"
        notices.append(f"--split {args.split} {lost}; set that fraction to 0, or raise it")
    card = _card(args, codec, checked, shards, refusals)
    null_text = null_text or checked.null_text
    if encoder is not None:
        encoder = _as_stored(encoder, checked.text_rows)
        card["text_encoder"], null_text = encoder.settings, encoder.encode_all("")
    remove(begun.parent)
    made = MadeBy(command="python -m data_prep convert")
    publish(args.output_dir, shards=shards, card=card, null_text=null_text, made=made)
    return counts, refusals, notices


def _begun(args: Namespace) -> Path:
    """Prepares the output folder for a conversion: empties it and creates an "unfinished" marker.

    Returns the path of the marker, a file in the ledger's folder.

    Raises:
        PrepError: the folder holds something other than a conversion.
    """
    begun = args.output_dir / LEDGER / "conversion"
    prepare_folder(args.output_dir, overwrite=args.overwrite or begun.exists())
    if begun.parent.exists():
        raise PrepError(
            f"--output_dir {args.output_dir} holds a dataset that was packed; give another folder,"
            " or replace the dataset in it with --overwrite"
        )
    begun.parent.mkdir()
    begun.touch()
    return begun


def _linked(
    records: Iterator[CachedSample | RefusedRecord], checked: _CheckedRows, args: Namespace, *_: Any
) -> tuple[dict[Split, dict[str, int]], Refusals]:
    """Links MLPerf's tar files into the dataset; reads only the first sample, as a check.

    Returns as `_written`, without refusals.

    Raises:
        PrepError: the first sample cannot be used, or a tar cannot be read.
    """
    first = checked(next(records))
    if isinstance(first, RefusedRecord):
        raise PrepError(f"{first.source}: {first.detail}; restore it")
    checked.levels.clear()  # `link_shards` counts the first sample again
    return link_shards(args.folder, args.output_dir, checked.levels), Refusals()


def _written(
    records: Iterator[CachedSample | RefusedRecord],
    checked: _CheckedRows,
    args: Namespace,
    codec: Codec | None,
    split: SplitFractions,
) -> tuple[dict[Split, dict[str, int]], Refusals]:
    """Writes checked records to the shards of their splits.

    Returns the number of samples of each shard, by split, and the refusals.
    """
    refusals = Refusals()
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
        for record in map(checked, records):
            if isinstance(record, CachedSample):
                record = _converted(record, codec if args.latents == "raw" else None)
            if isinstance(record, RefusedRecord):
                refusals.add(record.source, str(record.reason), record.detail)
                continue
            parts = sample_parts(record.tensors, record.about)
            part = Split.VAL if "timestep" in record.about else split.split_of(record.key)
            series[part].write(record.key, parts)
    return {part: one.counts for part, one in series.items() if one.counts}, refusals


def _as_stored(encoder: text.TextEncoder, rows: set[int]) -> text.TextEncoder:
    """A copy of `encoder`, with `padding` KEEP if all texts have its full length, else TRIM.

    `rows` is the set of the lengths of the cache's texts, in tokens. An encoder that has no setting
    `padding` is returned unchanged.
    """
    if not isinstance(encoder, UnmaskedTextEncoder):
        return encoder
    kept = rows == {encoder.most_rows}
    return replace(encoder, padding=EncoderPadding.KEEP if kept else EncoderPadding.TRIM)


def _missing_conditions(folder: Path, names: set[str]) -> list[str]:
    """A list with a warning if a cache of Wan lacks what image-to-video needs; else empty.

    `names` has the names of the tensors in the cache.
    """
    if not (folder / INDEX).exists() or "condition_latent" in names:
        return []
    if not str(index_of(folder).get("model_type")).startswith("wan"):
        return []
    return [
        "text-to-video of Wan trains on these shards, but image-to-video does not: it needs"
        " condition_latent, which is made from the pixels of all frames, and AutoModel's cache"
        " holds one frame of each video; for image-to-video, pack the videos with python -m"
        " data_prep video --processor wan --workload_type i2v"
    ]


def _moved_to_train(folder: Path, shards: dict[Split, dict[str, int]]) -> dict[str, int]:
    """Renames the only split that has samples to `train`; returns the samples of each shard."""
    ((part, counts),) = shards.items()
    if part is not Split.TRAIN:
        (folder / part).rename(folder / Split.TRAIN)
    return counts


class _CheckedRows:
    """Checks the samples of one dataset one by one, and makes their keys unique.

    Their latents must have as many channels as the first sample's, their texts as many features.
    """

    def __init__(self) -> None:
        self.total, self.widths, self.names = 0, dict[str, int](), set[str]()
        self.text_rows, self.levels = set[int](), Counter[int]()
        self._widths_of_null = dict[str, int]()
        self._keys, self._seen = set[str](), Counter[str]()

    def __call__(self, record: CachedSample | RefusedRecord) -> CachedSample | RefusedRecord:
        self.total += 1
        if isinstance(record, RefusedRecord):
            return record
        tensors = record.tensors
        widths = {"channels": tensors["latent"].shape[0], "text": tensors["text"].shape[1]}
        self.widths = self.widths or widths
        if widths != self.widths:
            found = (
                f"it has {widths['channels']} latent channels and text width {widths['text']}; the"
                f" samples before it have {self.widths['channels']} and {self.widths['text']};"
                " convert samples of other models separately"
            )
            return RefusedRecord(source=record.file, reason=Reason.OTHER_MODEL, detail=found)
        self.names |= tensors.keys()
        self.levels.update([record.about["timestep"]] if "timestep" in record.about else [])
        self.text_rows.add(len(tensors["text"]))
        for name in tensors.keys() & {"text_2", "pooled_text"}:
            self._widths_of_null[name] = tensors[name].shape[-1]
        return replace(record, key=self._unique(record.key))

    @property
    def null_text(self) -> dict[str, torch.Tensor]:
        """Null inputs by name, for a dataset whose text encoder is unknown.

        `text` is one row of zeros, `text_2` has no rows, and `pooled_text` is a vector of zeros.
        """
        sizes: dict[str, tuple[int, ...]] = {"text": (1, self.widths["text"])}
        for name, width in self._widths_of_null.items():
            sizes[name] = (0, width) if name == "text_2" else (width,)
        return {n: torch.zeros(size, dtype=torch.bfloat16) for n, size in sizes.items()}

    def _unique(self, key: str) -> str:
        """`key` if no earlier sample has it; else `key` with a number appended, such as `0-2`.

        Keys may repeat because each rank of another tool may count its keys from 0.
        """
        unique = key
        while unique in self._keys:
            self._seen[key] += 1
            unique = f"{key}-{self._seen[key] + 1}"
        self._keys.add(unique)
        return unique


def _converted(record: CachedSample, whitened_by: Codec | None) -> CachedSample | RefusedRecord:
    """The sample with its tensors in the dtypes of our shards, or its refusal.

    The latent is normalised for the codec `whitened_by`, unless that is None. A sample is refused
    if its latent has another number of channels than the codec, or a number exceeds the range of a
    dtype.
    """
    latent_CFHW = record.tensors["latent"]
    if whitened_by is not None:
        channels = whitened_by.channels
        if len(latent_CFHW) != channels:
            detail = (
                f"the latent has {len(latent_CFHW)} channels, and processor {whitened_by.name} has"
                f" {channels}; give the --processor that encoded it"
            )
            return RefusedRecord(source=record.file, reason=Reason.OTHER_MODEL, detail=detail)
        latent_CFHW = whitened_by.whitening.apply(latent_CFHW)
    dtypes, tensors = _DTYPES, {**record.tensors, "latent": latent_CFHW}
    if tensors.keys() >= {*DISTRIBUTION}:
        dtypes = {**_DTYPES, **dict.fromkeys(DISTRIBUTION, DISTRIBUTION_DTYPE)}
    tensors = {name: t.to(dtypes.get(name, t.dtype)) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            detail = f"the {name} has numbers beyond {tensor.dtype}; encode the sample again"
            return RefusedRecord(source=record.file, reason=Reason.NOT_FINITE, detail=detail)
    return replace(
        record, tensors=tensors, about={"format_version": FORMAT_VERSION, **record.about}
    )


def _card(
    args: Namespace,
    codec: Codec | None,
    checked: _CheckedRows,
    shards: dict[Split, dict[str, int]],
    refusals: Refusals,
) -> dict[str, Any]:
    """The dataset card of a converted cache.

    Without --processor the card names no codec, so the latents cannot be decoded later.
    """
    about_codec = {"name": codec.name, **codec.settings} if codec else {"name": "unknown"}
    whitening, widths, dtype = codec.whitening if codec else None, checked.widths, LATENT_DTYPE
    text_encoder: dict[str, Any] = {"name": "unknown", "width": widths["text"]}
    if "latent_logvar" in checked.names:
        dtype, whitening = DISTRIBUTION_DTYPE, whitening_of_mlperf(widths["channels"])
        text_encoder["padding"] = str(EncoderPadding.KEEP)
    return {
        "format_version": FORMAT_VERSION,
        "processor": about_codec,
        "text_encoder": text_encoder,
        "latent": {
            "channels": widths["channels"],
            "dtype": str(dtype).removeprefix("torch."),
            "mean": whitening.mean if whitening else [],
            "std": whitening.std if whitening else [],
        },
        "splits": {
            str(part): {"samples": sum(counts.values()), "shards": len(counts)}
            for part, counts in shards.items()
        },
        "sources": [args.folder.resolve().name],
        "refused": refusals.counts,
        "settings": {"split": args.split or DEFAULT_SPLIT, "latents": args.latents},
        "license": args.license,
    }
