"""File of adapters -> a checkpoint of adapters beside a base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dit.config import LoraConfig, RunConfig, Weights
from dit.convert.atomic_folder import new_folder
from dit.convert.diffusers_checkpoint import is_diffusers_folder, open_folder
from dit.convert.errors import ConvertError
from dit.convert.import_ import checked_table, found_model, found_objective, stored_precision
from dit.convert.load_hf.start import origin_of
from dit.convert.lora.stored import write_adapters
from dit.distributed.collective_errors import on_first_rank
from dit.lora.adapter import AdapterShape
from dit.lora.factors import LoraFactors, check_fits
from dit.lora.read import read_lora
from dit.train.checkpoint.adapters import AdapterRun, FrozenBase, adapters_of, digest_of
from dit.train.checkpoint.paths import find_checkpoint, saved_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedLora:
    """A checkpoint of adapters."""

    path: Path
    modules: int
    ranks: tuple[int, ...]


def import_lora(
    file: Path,
    base: Path,
    target: Path,
    *,
    base_weights: Weights = Weights.MODEL,
    without_text_encoder: Callable[[str], None] | None = None,
) -> ImportedLora:
    """Writes the checkpoint `target` of the adapters in `file`, for the weights of `base`.

    `base` is a checkpoint, or a Diffusers folder; `without_text_encoder` is that of `read_lora`.
    Collective; the first process writes.

    Raises:
        LoraFileError: the file cannot be read, or is of another network than the base.
        ConvertError: the base is none, or `target` exists or cannot be written.
        CheckpointError: the base is damaged.
    """
    frozen, config = _base(base, averaged=base_weights is Weights.EMA)
    factors = read_lora(file, config.model, without_text_encoder=without_text_encoder)
    check_fits(factors, config.model, place=file)
    shapes = {n: AdapterShape(rank=one.rank, alpha=one.alpha) for n, one in factors.items()}
    run = AdapterRun(adapters=shapes, base=frozen)
    adapted = replace(config, lora=_described(factors))
    with new_folder(target, option="--megatron-path") as folder:
        on_first_rank(lambda: write_adapters(folder, factors, run, adapted))
    ranks = tuple(sorted({one.rank for one in factors.values()}))
    return ImportedLora(path=target, modules=len(factors), ranks=ranks)


def _base(base: Path, *, averaged: bool) -> tuple[FrozenBase, RunConfig]:
    """The frozen weights, and the configuration of their network.

    Raises:
        ConvertError: there are none.
        CheckpointError: they are damaged.
    """
    path = find_checkpoint(base)
    if path is not None and adapters_of(path) is None:
        digest = digest_of(path)
        frozen = FrozenBase(path=path.resolve(), averaged=averaged, digest=digest)
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
    frozen = FrozenBase(path=base.resolve(), diffusers=True, digest=digest)
    return frozen, RunConfig(model=model, objective=objective)


def _described(factors: Mapping[str, LoraFactors]) -> LoraConfig:
    """What a configuration says of them: the commonest rank and alpha, and every name."""
    ranks, alphas = (Counter(values) for values in zip(*_counts(factors), strict=True))
    return LoraConfig(
        rank=ranks.most_common(1)[0][0],
        alpha=alphas.most_common(1)[0][0],
        targets=tuple(factors),
    )


def _counts(factors: Mapping[str, LoraFactors]) -> list[tuple[int, float]]:
    return [(one.rank, one.alpha) for one in factors.values()]
