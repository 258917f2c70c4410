"""Converts LoRA adapters between checkpoints and files, or merges them into weights.

1. open_adapters  the adapters of a checkpoint, by Diffusers' module names
2. export_lora    a folder of adapters for Diffusers, peft and ComfyUI
3. open_merged    weights W + alpha / r B A, computed one tensor at a time
4. import_lora    a checkpoint of adapters, from their file and a base
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dit.checkpoint_paths import (
    ADAPTERS,
    find_checkpoint,
    saved_card,
    saved_config,
    sync_and_digest,
    write_manifest,
)
from dit.config import LoraConfig, ModelConfig, RunConfig, Weights
from dit.config_loading import save_config
from dit.convert.atomic_folder import new_folder
from dit.convert.cards import LoraCard, PictureCode, RunFacts, write_card
from dit.convert.diffusers_checkpoint import DiffusersFolder, is_diffusers_folder, open_folder
from dit.convert.errors import ConvertError
from dit.convert.import_ import stored_precision
from dit.convert.load_hf.settings import checked_table, found_model, found_objective
from dit.convert.load_hf.start import origin_of, weights_of_folder
from dit.convert.megatron_checkpoint import StoredWeights, write_tensors
from dit.distributed.collective_errors import on_first_rank
from dit.lora.checkpoint import (
    AdapterRun,
    FrozenBase,
    adapters_of,
    checked_base,
    digest_of,
    found_base,
)
from dit.lora.factors import (
    FactorsByModule,
    LoraFactors,
    check_fits,
    from_stored,
    shapes_of,
    to_stored,
)
from dit.lora.files import COMFYUI_FILE, read_lora, write_lora
from dit.lora.targets import their_modules
from dit.models.diffusers.names import Pair
from dit.models.registry import diffusers_form, family_of, pairs
from dit.train.checkpoint.starting_point import named_checkpoint

_ADAPTERS = ("lora.rank", "lora.alpha", "lora.targets", "lora.dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapters:
    """The adapters of a checkpoint, in memory."""

    path: Path
    config: RunConfig
    run: AdapterRun
    weights: Weights  # whether they are averages
    factors: dict[str, LoraFactors]


def open_adapters(
    checkpoint: Path, weights: Weights | None = None, *, critic: bool = False
) -> StoredAdapters:
    """Reads the adapters of a checkpoint or run folder.

    `weights=None` takes the EMA if there is one. With `critic`, the adapters are those of the
    critic of a distillation.

    Raises:
        ConvertError: the checkpoint has no adapters, or no such weights.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    path = named_checkpoint(checkpoint, named=f"--megatron-path {checkpoint}")
    run = adapters_of(path)
    if run is None:
        raise ConvertError(
            f"{path} holds whole weights and no adapters; export it with `python -m dit.convert"
            " export`"
        )
    averaged = StoredWeights(path, averaged=False, critic=critic).has_average
    if weights is Weights.EMA and not averaged:
        raise ConvertError(f"{path} holds no average of the adapters; use --weights model")
    chosen = weights or (Weights.EMA if averaged else Weights.MODEL)
    stored = StoredWeights(path, averaged=chosen is Weights.EMA, critic=critic)
    config = saved_config(path).of_network(critic=critic)
    factors = from_stored(run.adapters, config.model, stored.read_whole)
    return StoredAdapters(path=path, config=config, run=run, weights=chosen, factors=factors)


def export_lora(
    checkpoint: Path,
    target: Path,
    *,
    weights: Weights | None = None,
    dtype: torch.dtype = torch.float32,
    base_model: str | None = None,
    critic: bool = False,
) -> StoredAdapters:
    """Writes the adapters of a checkpoint to the folder `target`, and returns them.

    Collective; the first process writes. `base_model` is the base's name on the hub, for the card
    and for peft.

    Raises:
        ConvertError: there are no adapters, or `target` exists or cannot be written.
        CheckpointError: the checkpoint is damaged.
    """
    opened = open_adapters(checkpoint, weights, critic=critic)
    names = _comfyui_names(opened.config.model)
    with new_folder(target, option="--hf-path") as folder:
        on_first_rank(
            lambda: write_folder(
                folder, opened.factors, _card(opened, base_model), comfyui_names=names, dtype=dtype
            )
        )
    return opened


def _comfyui_names(model: ModelConfig) -> Mapping[str, str] | None:
    """Diffusers' names of linears -> ComfyUI's, for the network `model`.

    The result is None if ComfyUI reads Diffusers' names, or if Diffusers lacks the network.
    """
    if family_of(model).diffusers is None:
        return None
    names = diffusers_form(model).comfyui_names
    return None if names is None else names(model)


def write_folder(
    folder: Path,
    factors: FactorsByModule,
    card: LoraCard,
    *,
    comfyui_names: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes adapters into an existing folder, with the card (README.md) and its pictures.

    Raises:
        OSError: a file cannot be written.
    """
    files = write_lora(folder, factors, base=card.base, comfyui_names=comfyui_names, dtype=dtype)
    write_card(folder, card.text(comfyui=folder / COMFYUI_FILE in files), card.run)


def _card(opened: StoredAdapters, base_model: str | None) -> LoraCard:
    """The card of the adapters of a checkpoint."""
    config, facts = opened.config, RunFacts.of(opened.path, opened.config, *_ADAPTERS)
    digest = opened.run.base.digest or None
    if family_of(config.model).diffusers is None:
        return LoraCard(network=config.model.family, base=base_model, base_digest=digest, run=facts)
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
        base_digest=digest,
        code=code.text,
        run=facts,
    )


class MergedWeights:
    """Weights W + alpha / r B A, added in float32 and returned in the dtype of W."""

    def __init__(self, base: StoredWeights | _DiffusersBase, factors: FactorsByModule):
        self.base, self.factors = base, factors

    def dtype(self, pair: Pair) -> torch.dtype:
        return self.base.dtype(pair)

    def read(self, pair: Pair) -> Tensor:
        """The whole tensor of `pair` in this project's network, with adapters merged."""
        stored = self.base.read(pair)
        names = their_modules(pair)
        if stored.ndim != 2 or not any(name in self.factors for name in names):
            return stored
        parts = pair.split(stored.float())
        for number, name in enumerate(names):
            if (one := self.factors.get(name)) is not None:
                parts[number] = parts[number] + one.product()
        return pair.join(parts).to(stored.dtype)


def open_merged(
    checkpoint: Path, weights: Weights | None, *, critic: bool = False
) -> tuple[MergedWeights, RunConfig, Weights]:
    """(weights with adapters merged, configuration, kind of weights) of a checkpoint of adapters.

    The kind is EMA or MODEL; `weights=None` takes the EMA if there is one.

    Raises:
        ConvertError: there are no adapters.
        CheckpointError: the checkpoint is damaged, or its base is not found.
    """
    opened = open_adapters(checkpoint, weights, critic=critic)
    place = found_base(opened.run.base, moved_to=opened.config.lora.base)
    stored = _stored_base(place, opened)
    return MergedWeights(stored, opened.factors), opened.config, opened.weights


class _DiffusersBase:
    """The weights of a Diffusers folder, converted to the tensors of this project's network."""

    def __init__(self, source: DiffusersFolder):
        self.source = source

    def dtype(self, pair: Pair) -> torch.dtype:
        return self.source.headers[pair.theirs[0]].dtype

    def read(self, pair: Pair) -> Tensor:
        return pair.join([self.source.read(name) for name in pair.theirs])


def _stored_base(base: FrozenBase, opened: StoredAdapters) -> StoredWeights | _DiffusersBase:
    """The frozen weights under the adapters `opened`.

    Raises:
        ConvertError: the weights were drawn from a seed, and are stored nowhere.
        CheckpointError: the weights have changed since the run.
    """
    if base.path is None:
        raise ConvertError(
            f"the weights beside the adapters of {opened.path} were drawn from a seed, and are in"
            " no checkpoint; `python -m dit.convert export-lora` exports only the adapters"
        )
    if base.diffusers:
        folder = weights_of_folder(base.path, opened.config.model)
        checked_base(base, folder.origin().digest)
        return _DiffusersBase(folder.weights.source)
    stored = StoredWeights(base.path, averaged=base.averaged)
    stored.check(pairs(opened.config.model))
    return stored


def import_lora(
    file: Path,
    base: Path,
    target: Path,
    *,
    without_text_encoder: Callable[[str], None] | None = None,
) -> dict[str, LoraFactors]:
    """Writes the checkpoint `target` with the adapters in `file`, which were trained on `base`.

    `base` is a checkpoint or a Diffusers folder; `without_text_encoder` is as in `read_lora`.
    Collective; the first process writes.

    Raises:
        LoraFileError: the file cannot be read, or belongs to another network than the base.
        ConvertError: `base` is neither, or `target` exists or cannot be written.
        CheckpointError: the base is damaged.
    """
    frozen, config = _base(base)
    factors = read_lora(file, config.model, without_text_encoder=without_text_encoder)
    check_fits(factors, config.model, place=file)
    run = AdapterRun(adapters=shapes_of(factors), base=frozen)
    adapted = replace(config, lora=_described(factors))
    with new_folder(target, option="--megatron-path") as folder:
        on_first_rank(lambda: write_adapters(folder, factors, run, adapted))
    return factors


def _base(base: Path) -> tuple[FrozenBase, RunConfig]:
    """(frozen weights, configuration of their network) of a checkpoint or Diffusers folder.

    Raises:
        ConvertError: there are no whole weights, or a Diffusers folder is not supported.
        CheckpointError: the checkpoint has no manifest, or a file of it cannot be read.
    """
    path = find_checkpoint(base)
    if path is not None and adapters_of(path) is None:
        digest = digest_of(path)
        frozen = FrozenBase(path=path.resolve(), averaged=False, digest=digest)
        return frozen, saved_config(path)
    if path is not None or not is_diffusers_folder(base):
        raise ConvertError(
            f"--base-path {base} holds no whole weights; give the Diffusers folder of the model"
            " that the adapters are for, or the checkpoint that `python -m dit.convert import` made"
            " of it"
        )
    source = open_folder(base, option="--base-path")
    model = found_model(source, precision=stored_precision(source).precision)
    objective = found_objective(source, model, ()).objective
    checked_table(source, model)
    digest = origin_of(source).digest
    frozen = FrozenBase(path=base.resolve(), diffusers=True, averaged=False, digest=digest)
    return frozen, RunConfig(model=model, objective=objective)


def _described(factors: FactorsByModule) -> LoraConfig:
    """The LoRA configuration of `factors`: the most common rank and alpha, and all targets."""
    ranks = Counter(one.rank for one in factors.values())
    alphas = Counter(one.alpha for one in factors.values())
    return LoraConfig(
        rank=ranks.most_common(1)[0][0],
        alpha=alphas.most_common(1)[0][0],
        targets=tuple(factors),
    )


def write_adapters(
    folder: Path, factors: FactorsByModule, run: AdapterRun, config: RunConfig
) -> None:
    """Writes a checkpoint from which a run of adapters starts into the existing `folder`."""
    file = folder / "__0_0.distcp"
    write_tensors(file, to_stored(factors, config.model))
    save_config(config, folder / "config.yaml")
    (folder / ADAPTERS).write_text(run.as_json())
    write_manifest(folder, {file.name: sync_and_digest(file)})
