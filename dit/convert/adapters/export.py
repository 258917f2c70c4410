"""Checkpoint of adapters -> a folder for Diffusers, peft and ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dit.config import Weights
from dit.convert.adapters.stored import StoredAdapters, open_adapters
from dit.convert.atomic_folder import new_folder
from dit.convert.cards import LoraCard, PictureCode, RunFacts, write_card
from dit.convert.lora import COMFYUI_FILE, LoraFactors, write_lora
from dit.distributed.collective_errors import on_first_rank
from dit.models.registry import diffusers_form
from dit.train.checkpoint.paths import saved_card

_ADAPTERS = ("lora.rank", "lora.alpha", "lora.targets", "lora.dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedLora:
    """A folder with the adapters of a checkpoint."""

    path: Path
    weights: Weights
    modules: int
    numbers: int


def export_lora(
    checkpoint: Path,
    target: Path,
    *,
    weights: Weights | None = None,
    dtype: torch.dtype = torch.float32,
    base_model: str | None = None,
) -> ExportedLora:
    """Writes the folder `target`. Collective; the first process writes.

    `base_model` is the name that the base has on the hub, for the card and for peft.

    Raises:
        ConvertError: there are no adapters, or `target` exists or cannot be written.
        CheckpointError: the checkpoint is damaged.
    """
    opened = open_adapters(checkpoint, weights)
    form = diffusers_form(opened.config.model)
    names = None if form.comfyui_names is None else form.comfyui_names(opened.config.model)
    with new_folder(target, option="--hf-path") as folder:
        on_first_rank(
            lambda: write_folder(
                folder, opened.factors, card(opened, base_model), comfyui_names=names, dtype=dtype
            )
        )
    numbers = sum(one.down.numel() + one.up.numel() for one in opened.factors.values())
    return ExportedLora(
        path=target, weights=opened.weights, modules=len(opened.factors), numbers=numbers
    )


def write_folder(
    folder: Path,
    factors: Mapping[str, LoraFactors],
    card: LoraCard,
    *,
    comfyui_names: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fills an existing folder: `write_lora`, README.md with the card, samples/ with its pictures.

    Raises:
        OSError: a file cannot be written.
    """
    files = write_lora(folder, factors, base=card.base, comfyui_names=comfyui_names, dtype=dtype)
    write_card(folder, card.text(comfyui=folder / COMFYUI_FILE in files), card.run)


def card(opened: StoredAdapters, base_model: str | None) -> LoraCard:
    """What is known of a checkpoint's adapters."""
    config, facts = opened.config, RunFacts.of(opened.path, opened.config, *_ADAPTERS)
    code = PictureCode(
        config=config,
        card=saved_card(opened.path) or {},
        prompt=facts.prompt,
        base=base_model or "BASE",
        adapters=True,
    )
    return LoraCard(
        network=diffusers_form(config.model).class_name,
        base=base_model,
        base_digest=opened.run.base.digest or None,
        code=code.text,
        run=facts,
    )
