"""The adapters of a checkpoint, by Diffusers' modules; and a checkpoint of adapters written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dit.config import RunConfig, Weights
from dit.config_loading import save_config
from dit.convert.errors import ConvertError
from dit.convert.lora import LoraFactors
from dit.convert.megatron_checkpoint import StoredWeights, write_tensors
from dit.models.lora.factors import FactorPair, from_stored, to_stored
from dit.models.lora.targets import adaptable_pairs
from dit.train.checkpoint.adapters import ADAPTERS, AdapterRun, adapters_of
from dit.train.checkpoint.paths import (
    named_checkpoint,
    saved_config,
    sync_and_digest,
    write_manifest,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapters:
    """The adapters of a checkpoint."""

    path: Path
    config: RunConfig
    run: AdapterRun
    weights: Weights  # whether they are averages
    factors: dict[str, LoraFactors]


def open_adapters(checkpoint: Path, weights: Weights | None = None) -> StoredAdapters:
    """Reads the adapters of a checkpoint or run folder; None takes the averages if there are any.

    Raises:
        ConvertError: the checkpoint has no adapters, or no such weights.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    path = named_checkpoint(checkpoint, named=f"--megatron-path {checkpoint}")
    run = adapters_of(path)
    if run is None:
        raise ConvertError(
            f"{path} holds whole weights and no adapters; `python -m dit.convert export` takes them"
        )
    averaged = StoredWeights(path, averaged=False).has_average
    if weights is Weights.EMA and not averaged:
        raise ConvertError(f"{path} holds no average of the adapters; use --weights model")
    chosen = weights or (Weights.EMA if averaged else Weights.MODEL)
    stored, config = StoredWeights(path, averaged=chosen is Weights.EMA), saved_config(path)
    found = from_stored(run.adapters, adaptable_pairs(config.model), stored.read_whole)
    factors = {
        name: LoraFactors(down=one.down.float(), up=one.up.float(), alpha=run.adapters[name].alpha)
        for name, one in found.items()
    }
    return StoredAdapters(path=path, config=config, run=run, weights=chosen, factors=factors)


def write_adapters(
    folder: Path, factors: Mapping[str, LoraFactors], run: AdapterRun, config: RunConfig
) -> None:
    """Fills an existing folder with a checkpoint that a run of adapters starts from."""
    by_module = {name: FactorPair(one.down, one.up) for name, one in factors.items()}
    file = folder / "__0_0.distcp"
    write_tensors(file, to_stored(by_module, adaptable_pairs(config.model)))
    save_config(config, folder / "config.yaml")
    (folder / ADAPTERS).write_text(run.as_json())
    write_manifest(folder, {file.name: sync_and_digest(file)})
