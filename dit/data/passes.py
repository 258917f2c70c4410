"""How often a run sees each sample, from the sizes in the dataset card: nothing is read or packed.

1. samples_a_pack   sizes of the samples -> how many share a pack
2. passes_line      `train.train_iters` -> passes through the data
3. data_lines       what a dry run says of the data
4. steps_of_epochs  `train.epochs` -> `train.train_iters`
"""

# F H W frames, rows, columns of a latent

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron.energon.epathlib import EPath

from dit.config import Problems, RunConfig
from dit.data.bin_packing import best_fit_decreasing
from dit.data.datasets import count_samples, train_leaves
from dit.data.pack import PatchLayout
from dit.data.preflight import check_data, read_data_card

_DRAWN = 2000  # samples that are packed to see how many share a pack


def samples_a_pack(config: RunConfig) -> float | None:
    """Samples in a pack on average; None for mock data, a blend, or a card that lists no sizes.

    Texts that take room in packs are not counted, so that of such families it is an upper bound.
    """
    leaves = train_leaves(config)
    card = read_data_card(leaves[0]) if len(leaves) == 1 else None
    try:
        lengths = _lengths(card or {}, config)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None  # of another tool, or damaged: the check of the data names that
    if not lengths:
        return None
    packs = best_fit_decreasing(lengths, capacity=config.dataset.task_encoder_seq_length)
    return len(lengths) / len(packs)


def _lengths(card: dict[str, Any], config: RunConfig) -> list[int]:
    """Tokens of `_DRAWN` samples, in the proportions of the card; too long ones are left out."""
    layout, latent, sizes = PatchLayout.of(config), card["latent"], card["sizes"]
    whole = sum(one["samples"] for one in sizes)
    lengths: list[int] = []
    for one in sizes:
        latent_FHW = (
            1 + (one["num_frames"] - 1) // latent["temporal_stride"],
            one["height"] // latent["stride"],
            one["width"] // latent["stride"],
        )
        patch = (layout.patch_temporal, layout.patch_spatial, layout.patch_spatial)
        tokens = math.prod(side // part for side, part in zip(latent_FHW, patch, strict=True))
        padded = -(-tokens // layout.sample_multiple) * layout.sample_multiple
        if 0 < padded <= config.dataset.task_encoder_seq_length:
            lengths += [padded] * max(1, round(_DRAWN * one["samples"] / whole))
    return lengths


def passes_line(config: RunConfig) -> str:
    """How often each sample is seen, in words; empty where the card does not tell."""
    share = samples_a_pack(config)
    if share is None:
        return ""
    (leaf,) = train_leaves(config)
    seen = config.train.train_iters * config.train.global_batch_size * share
    return (
        f"{config.train.train_iters:,} steps see each of the {count_samples(leaf):,} training"
        f" samples about {seen / max(1, count_samples(leaf)):.3g} times"
        f" (about {share:.3g} in a pack)"
    )


def data_lines(config: RunConfig) -> str:
    """The lines of a dry run about the data, as comments; empty for mock data or no data.

    A missing folder is no fault here, because often another machine trains.

    Raises:
        DataError: as `check_data`.
    """
    data = config.dataset
    paths = [entry.path for entry in data.blend] or ([data.path] if data.path else [])
    if data.mock or not paths:
        return ""
    absent = [path for path in paths if not EPath(path).is_dir() and not EPath(path).is_file()]
    if absent:
        return f"# {'shards':<14}NOT CHECKED: {absent[0]} does not exist here\n"
    rows = {"shards": str(check_data(config)), "passes": passes_line(config)}
    return "".join(f"# {name:<14}{said}\n" for name, said in rows.items() if said)


def steps_of_epochs(config: RunConfig) -> RunConfig:
    """The configuration with the `train_iters` that `train.epochs` asks for, where it is set.

    Raises:
        Problems: the card does not tell how many samples share a pack.
    """
    if config.train.epochs is None:
        return config
    share = samples_a_pack(config)
    if share is None:
        raise Problems(
            [
                f"train.epochs={config.train.epochs:g} counts passes through one dataset whose"
                " dataset_card.json lists the sizes of its samples, and there is none (mock data, a"
                " blend, or shards of another tool); set train.train_iters"
            ]
        )
    (leaf,) = train_leaves(config)
    packs = config.train.epochs * count_samples(leaf) / share
    steps = max(1, math.ceil(packs / config.train.global_batch_size))
    return replace(config, train=replace(config.train, train_iters=steps))
