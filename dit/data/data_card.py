"""`dataset_card.json`: how the data were made, and whether a model fits them."""

# C latent channels; F H W latent frames, rows, columns

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dit.config import RunConfig
from dit.data.cook import Expected, check_latent
from dit.data.datasets import DatasetSplit, train_leaves
from dit.data.rejections import REMEDIES, DataError, Reject, SampleRefused
from dit.json_text import parse_json

FORMAT_VERSION = 1
CARD = "dataset_card.json"
_RESTORE = "restore it, or pack the data again"
_SENSIBLE = 2**40
"""More than any count in a card; torch could not multiply such sides."""


def dataset_card(config: RunConfig) -> dict[str, Any] | None:
    """The card of the first dataset: how to rebuild its encoders; None where absent.

    Raises:
        DataError: it is no JSON object.
    """
    leaves = train_leaves(config)
    return read_data_card(leaves[0]) if leaves else None


def read_data_card(leaf: DatasetSplit) -> dict[str, Any] | None:
    """The card of a dataset folder, None where absent.

    Raises:
        DataError: it is no JSON object.
    """
    path = leaf.path / CARD
    if not path.is_file():
        return None
    try:
        card = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_RESTORE}") from error
    if not isinstance(card, dict):
        raise DataError(f"{path} is no JSON object, but {type(card).__name__}; {_RESTORE}")
    return card


def card_faults(card: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Why the samples of a dataset cannot be those of the model, or the card not one of ours.

    What a card does not say is not looked at: other tools write none, or less.
    """
    version = card.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        yield _other_version(version)
        return
    parts = {name: card.get(name, {}) for name in ("latent", "text_encoder", "splits")}
    wrong = [name for name, part in parts.items() if not isinstance(part, dict)]
    if wrong:
        yield f"its {wrong[0]!r} is no object; {_RESTORE}"
        return
    found = (
        ("latent", "channels", "model.in_channels", config.model.in_channels),
        ("text_encoder", "width", "model.crossattn_emb_size", config.model.crossattn_emb_size),
    )
    for part, name, key, value in found:
        stored = parts[part].get(name)
        if stored is not None and not _is_count(stored):
            yield f"its {part}.{name} is {stored!r}, no whole number above 0; {_RESTORE}"
        elif stored not in (None, value):
            yield f"its {part}.{name} is {stored}, and {key}={value}; set {key}={stored}"
    yield from _sizes(card, config)


def _other_version(version: Any) -> str:
    if _is_count(version):
        return (
            f"its format_version is {version}, and this program reads {FORMAT_VERSION}: the program"
            " is older than the data; update it"
        )
    return f"its format_version is {version!r}, no version of this format; {_RESTORE}"


def _sizes(card: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Sizes that do not fit, where they make up too much of the samples."""
    latent, sizes = card.get("latent", {}), card.get("sizes")
    strides = [latent.get("stride"), latent.get("temporal_stride")]
    if sizes is None or not all(map(_is_count, strides)):
        return
    names = ("num_frames", "height", "width", "samples")
    if not isinstance(sizes, list) or not all(
        isinstance(size, dict) and all(_is_count(size.get(name)) for name in names)
        for size in sizes
    ):
        yield f"its 'sizes' are no list of {', '.join(names)}; {_RESTORE}"
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
    """Why samples of so many frames and pixels would be refused."""
    stride, temporal = strides
    shape_FHW = (
        1 + -(-(size["num_frames"] - 1) // temporal),
        *(size[side] // stride for side in ("height", "width")),
    )
    expected = Expected.of(config)
    try:
        check_latent(torch.empty(expected.channels, *shape_FHW, device="meta"), expected)
    except SampleRefused as why:
        return why
    except RuntimeError:  # torch cannot count the numbers of such a latent
        return SampleRefused(Reject.TOO_LONG, f"latent {list(shape_FHW)} has no end")
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _SENSIBLE
