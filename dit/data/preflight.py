"""Checks of the data before the first step, without reading a sample.

1. check_data      every shard and index exists, and the dataset card fits the model
2. dataset_card    `dataset_card.json`, which describes how the data were made
3. lacks_sound     whether no sample has a sound

One process checks for all: a thousand ranks that look for ten thousand files burden any file
system.
"""

# C latent channels; F H W latent frames, rows, columns

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dit.config import CheckpointConfig, DatasetConfig, ModelConfig, RunConfig, TextPadding
from dit.data.cook import Expected, check_latent
from dit.data.datasets import DatasetSplit, count_samples, shards_of, train_leaves, val_leaves
from dit.data.rejections import REMEDIES, DataError, Reject, SampleRefused
from dit.data.tar_reader import is_sound
from dit.models.registry import family_of
from dit.parsing import parse_json
from dit.progress import counted
from dit.system_errors import explained, reason

SIDE_BY_SIDE = 16  # files; a network drive answers each after a millisecond or more
_SHOWN = 5  # faults in a message
CARD_VERSION = 1
CARD = "dataset_card.json"
_RESTORE = "restore it, or pack the data again"
_KEPT = "keep"  # text_encoder.padding in a card after data_prep --text_padding keep
_SENSIBLE = 2**40  # more than any count in a card; torch cannot multiply larger sides


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Result of a check without faults: numbers of training samples and shards, and notes."""

    samples: int
    shards: int
    notes: tuple[str, ...] = ()  # lines for the start of the log

    def __str__(self) -> str:
        samples = counted(self.samples, "training sample")
        return f"{samples} in {counted(self.shards, 'shard')}, none missing"


def check_data(config: RunConfig) -> Checked:
    """Checks all folders, shards and indices that a run will read, and their dataset cards.

    Raises:
        DataError: a folder, shard or index is missing or damaged, or the data do not fit the model;
            the message lists the first of the faults.
    """
    leaves, faults, notes = train_leaves(config.dataset), [], dict[str, None]()
    held_out = [
        leaf for one in validation_sets(config).values() for leaf in val_leaves(one.dataset)
    ]
    first = dataset_card(config) or {}
    for leaf in dict.fromkeys([*leaves, *held_out]):
        card = read_data_card(leaf)
        if other := made_otherwise(first, card or {}):
            notes[
                f"WARNING: {leaf.path} was not prepared as {leaves[0].path} ({other}): one network"
                " would learn both, and all samples are decoded with the codec of the latter; pack"
                " both with the same options"
            ] = None
        if card:
            faults += [f"{leaf.path / CARD}: {fault}" for fault in card_faults(card, config)]
        notes |= dict.fromkeys(_about_padding(leaf, card or {}, config.model))
        notes |= dict.fromkeys(_about_encoder(card or {}, config.model, config.checkpoint))
        faults += _shard_faults(leaf)
    if faults := list(dict.fromkeys(faults)):  # two splits of a folder have one card
        raise DataError("\n  ".join([_head(len(faults)), *faults[:_SHOWN]]))
    counts = [count_samples(leaf) for leaf in leaves]
    shards = sum(len(shards_of(leaf)) for leaf in leaves)
    return Checked(samples=sum(counts), shards=shards, notes=tuple(notes))


def validation_sets(config: RunConfig) -> dict[str, RunConfig]:
    """Name of each validation loss -> `config` with the dataset of that loss.

    It is empty if nothing is validated.
    """
    if not (config.train.eval_interval and config.train.eval_iters):
        return {}
    found = {"val_loss": config}
    for one in config.validation.sets:
        only = replace(
            config.dataset, path=one.path, blend=(), mock=False, use_train_split_for_val=False
        )
        found[f"val_{one.name}_loss"] = replace(config, dataset=only)
    return found


def _shard_faults(leaf: DatasetSplit) -> Iterator[str]:
    """Faults of the local shards of a folder; remote shards are checked when they are read."""
    local = [
        (shard.path.local_path(), shard.count)
        for shard in shards_of(leaf)
        if shard.path.is_local() and shard.count
    ]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        found = threads.map(lambda one: _shard_fault(*one, folder=str(leaf.path)), local)
        yield from filter(None, found)


def _shard_fault(shard: Path, count: int, *, folder: str) -> str:
    """The fault of the file `shard` or of its index; empty if there is none.

    `count` is the number of samples that `.info.json` states for the shard.
    """
    from dit.data.tar_reader import REINDEX, index_fault  # mock data have no shards

    if not shard.is_file():
        return (
            f"{shard} is missing; restore it, or list it under `exclude` in .nv-meta/split.yaml"
            " to go without"
        )
    index, how = Path(f"{shard}.idx"), REINDEX.format(folder=folder)
    try:
        offsets = index.read_bytes()
    except FileNotFoundError:
        return f"{index} is missing; {how}"
    except OSError as error:
        return f"{index} cannot be read ({reason(error)}); {how}"
    if fault := index_fault(offsets):
        return f"{index} is damaged: {fault}; {how}"
    if len(offsets) // 8 != count + 1:
        return (
            f"{index} lists {len(offsets) // 8 - 1} samples, but .nv-meta/.info.json says that the"
            f" shard has {count}; restore the file that is wrong, or pack the data again"
        )
    return ""


def _head(count: int) -> str:
    if count == 1:
        return "the data cannot be trained on:"
    shown = f", of which {_SHOWN} are" if count > _SHOWN else ""
    return f"the data cannot be trained on, for {count} reasons{shown}:"


def dataset_card(config: RunConfig) -> dict[str, Any] | None:
    """The card of the first training dataset, which stands for all; None if it has none.

    Raises:
        DataError: the card is not a JSON object.
    """
    leaves = train_leaves(config.dataset)
    return read_data_card(leaves[0]) if leaves else None


def read_data_card(leaf: DatasetSplit) -> dict[str, Any] | None:
    """The card of one dataset folder; None if it has none.

    Raises:
        DataError: the card is not a JSON object.
    """
    path = leaf.path / CARD
    if not path.is_file():
        return None
    try:
        card = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read ({explained(error)}); {_RESTORE}") from error
    if not isinstance(card, dict):
        raise DataError(f"{path} holds a {type(card).__name__}, not a JSON object; {_RESTORE}")
    return card


def lacks_sound(dataset: DatasetConfig) -> bool:
    """Whether it is certain that no training sample has a sound; False for mock data.

    The dataset card may say that no sound was packed. If it does not, the names of the files in the
    shards are read, up to the first sound. A shard that is remote or damaged is assumed to have a
    sound.

    Raises:
        DataError: a dataset is missing or not prepared, or a dataset card is not a JSON object.
    """
    leaves = train_leaves(dataset)
    return bool(leaves) and not any(map(_may_have_sound, leaves))


def _may_have_sound(leaf: DatasetSplit) -> bool:
    card = read_data_card(leaf) or {}
    if "processor" in card and "sound_latent" not in card:
        return False
    paths = [shard.path for shard in shards_of(leaf) if shard.count]
    return any(not path.is_local() or _holds_sound(path.local_path()) for path in paths)


def _holds_sound(shard: Path) -> bool:
    """Whether a file of a shard is a sound; True also if the shard is damaged."""
    try:
        with tarfile.open(shard, "r:") as files:
            return any(is_sound(Path(one.name).name.partition(".")[2]) for one in files)
    except (tarfile.TarError, OSError):
        return True


_MADE_BY = {"processor": ("name",), "latent": ("mean", "std"), "text_encoder": ("name",)}
"""Section of a card -> its entries that determine what latents and texts mean."""


def made_otherwise(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Names and values of entries in which two dataset cards differ; empty if there are none.

    Only entries that decide what latents and texts mean are compared, where both cards have them:
    one network cannot learn both meanings.
    """
    differing = []
    for part, names in _MADE_BY.items():
        parts = (one.get(part), other.get(part))
        for name in names:
            first, second = (of.get(name) if isinstance(of, dict) else None for of in parts)
            if None not in (first, second) and first != second:
                values = "" if isinstance(first, list) else f": {first}, {second}"
                differing.append(f"{part}.{name}{values}")
    return "; ".join(differing)


def card_faults(card: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Reasons, from its `card`, why a dataset does not fit the model.

    Entries that a card lacks are not checked, because other tools write no card, or a shorter one.
    """
    version = card.get("format_version", CARD_VERSION)
    if version != CARD_VERSION:
        yield _other_version(version)
        return
    parts = {name: card.get(name, {}) for name in ("latent", "text_encoder", "splits")}
    wrong = [name for name, part in parts.items() if not isinstance(part, dict)]
    if wrong:
        yield f"its {wrong[0]!r} is not a JSON object; {_RESTORE}"
        return
    found = (
        ("latent", "channels", "model.in_channels", config.model.in_channels),
        ("text_encoder", "width", "model.crossattn_emb_size", config.model.crossattn_emb_size),
    )
    for part, name, key, value in found:
        stored = parts[part].get(name)
        if stored is not None and not _is_count(stored):
            yield f"its {part}.{name} is {stored!r}, not a whole number above 0; {_RESTORE}"
        elif stored not in (None, value):
            yield f"its {part}.{name} is {stored}, but {key}={value}; set {key}={stored}"
    yield from _encoder_faults(parts["text_encoder"], config.model)
    yield from _padding_faults(parts["text_encoder"], config.model)
    yield from _sizes(card, config)


def _encoder_faults(encoder: dict[str, Any], model: ModelConfig) -> Iterator[str]:
    (text, *_), name = family_of(model).inputs(model), encoder.get("name")
    if (setting := text.refused_encoders.get(str(name))) is not None:
        yield (
            f"its texts are of the encoder {name}, which only a network with {setting} reads, and"
            f" this network reads those of {text.encoder}: set {setting}, or pack the data with"
            f" --processor {text.encoder}"
        )


def _stored_padding(encoder: dict[str, Any]) -> bool | None:
    """Whether texts include hidden states of padding; None if the card does not say.

    `encoder` is the card's section on the text encoder. data_prep writes the entry `padding` only
    if they do; the encoder of a converted dataset may be unknown.
    """
    padding = encoder.get("padding")
    if padding is None:
        return None if encoder.get("name", "unknown") == "unknown" else False
    return padding == _KEPT


def _padding_faults(encoder: dict[str, Any], model: ModelConfig) -> Iterator[str]:
    wanted = model.text_pad_to
    if encoder.get("padding") not in (None, _KEPT):
        yield f"its text_encoder.padding is {encoder['padding']!r}, not {_KEPT!r}; {_RESTORE}"
    elif wanted is TextPadding.STORED and _stored_padding(encoder) is False:
        yield (
            f"its texts end where their captions end, but model.text_pad_to={wanted} expects"
            " the padding of the text encoder, which published weights attend to: pack the data"
            " with --text_padding keep, or for your own network set model.text_pad_to=null"
        )
    elif wanted is not TextPadding.STORED and _stored_padding(encoder):
        shown, family = "null" if wanted is None else wanted, model.family
        here = f"set model.text_pad_to={TextPadding.STORED}"
        if not model.takes_stored_padding:
            here = f"train a network of the encoder's pipeline, as {family} reads no padding"
        yield (
            "its texts have the padding of their encoder (text_encoder.padding=keep), but"
            f" model.text_pad_to={shown} expects texts that end where their captions end: {here},"
            " or pack the data with --text_padding trim or another --text_encoder"
        )


def _about_padding(leaf: DatasetSplit, card: dict[str, Any], model: ModelConfig) -> Iterator[str]:
    """Yields a log line on whether the network reads the padding after captions, if it ever can."""
    if model.text_pad_to is not TextPadding.STORED:
        if model.takes_stored_padding:
            yield (
                "captions without the padding of their encoder, as model.text_pad_to=null says;"
                " published weights attend to it"
            )
        return
    encoder = card.get("text_encoder", {})
    if isinstance(encoder, dict) and _stored_padding(encoder):
        yield (
            f"captions with the padding of their encoder, {encoder.get('max_length')} rows each"
            f" (model.text_pad_to={TextPadding.STORED})"
        )
    else:
        yield (
            f"model.text_pad_to={TextPadding.STORED}, and nothing in {leaf.path} says whether its"
            " texts have the padding of their encoder: they are taken as they are"
        )


def _about_encoder(
    card: dict[str, Any], model: ModelConfig, checkpoint: CheckpointConfig
) -> Iterator[str]:
    """A log line if the texts' encoder is not that of the weights that are fine-tuned."""
    (text, *_) = family_of(model).inputs(model)
    encoder = card.get("text_encoder", {})
    found = encoder.get("name", "unknown") if isinstance(encoder, dict) else "unknown"
    if checkpoint.load_hf and text.encoder and found not in ("unknown", text.encoder):
        yield (
            f"texts of the encoder {found}, and the published weights of {model.name} read"
            f" those of {text.encoder}: pack the data with the latter to get what the published"
            " pipeline shows"
        )


def _other_version(version: Any) -> str:
    if _is_count(version):
        return (
            f"its format_version is {version}, but this program reads {CARD_VERSION}: the program"
            " is older than the data; update the program"
        )
    return f"its format_version is {version!r}, not a whole number above 0; {_RESTORE}"


def _sizes(card: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Faults of sizes on the card that do not fit the run, if too many samples have them."""
    latent, sizes = card.get("latent", {}), card.get("sizes")
    strides = [latent.get("stride"), latent.get("temporal_stride")]
    if sizes is None or not all(map(_is_count, strides)):
        return
    names = ("num_frames", "height", "width", "samples")
    if not isinstance(sizes, list) or not all(
        isinstance(size, dict) and all(_is_count(size.get(name)) for name in names)
        for size in sizes
    ):
        yield f"its 'sizes' are not a list of objects with {', '.join(names)}; {_RESTORE}"
        return
    splits = [part for part in card.get("splits", {}).values() if isinstance(part, dict)]
    counted = [part["samples"] for part in splits if _is_count(part.get("samples"))]
    total = max(sum(size["samples"] for size in sizes), sum(counted))
    misfits = [(size, why) for size in sizes if (why := _misfit(size, strides, config))]
    lost = sum(size["samples"] for size, _ in misfits)
    if lost > config.dataset.max_bad_fraction * total:
        size, why = misfits[0]
        shown = "{num_frames} x {height} x {width}".format(**size)
        yield (
            f"{lost:,} of its {total:,} samples do not fit the model or the pack, more than"
            f" dataset.max_bad_fraction={config.dataset.max_bad_fraction}: those of {shown} pixels,"
            f" {why.detail}; {REMEDIES[why.reason]}"
        )


def _misfit(size: dict[str, int], strides: list[Any], config: RunConfig) -> SampleRefused | None:
    """The refusal that samples of this `size` in frames and pixels would get, or None.

    `strides` are pixels per side of a latent cell, and frames per latent frame.
    """
    stride, temporal = strides
    shape_FHW = (
        1 + -(-(size["num_frames"] - 1) // temporal),
        *(size[side] // stride for side in ("height", "width")),
    )
    expected = Expected.of_training(config)
    try:
        check_latent(torch.empty(expected.channels, *shape_FHW, device="meta"), expected)
    except SampleRefused as why:
        return why
    except RuntimeError:  # the latent has more numbers than torch can count
        return SampleRefused(Reject.TOO_LONG, f"latent {list(shape_FHW)} has too many numbers")
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _SENSIBLE
