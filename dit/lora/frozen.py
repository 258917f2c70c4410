"""`lora.frozen_adapter`: a frozen adapter that is added to the base while others are trained.

1. frozen_adapter  the adapters in the file, and its entry in a checkpoint
2. _check_same     whether it is the file that the run has used so far

A "training adapter" was trained with plain targets on a distilled network's own outputs, and so
removes the distillation. Adapters that are trained with it added, with plain targets, learn only
the new data, and are used without it.

| added                                       | not added                                  |
|---------------------------------------------|--------------------------------------------|
| training; passes without gradients, because | pictures of a validation, generation,      |
| they concern the network in training;       | exports, merged weights, checkpoints,      |
| validation losses                           | which name the file                        |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from dit.checkpoint_paths import CheckpointError
from dit.config import LoraConfig, ModelConfig, RunConfig
from dit.lora.checkpoint import FrozenFile, Say, adapters_of
from dit.lora.factors import LoraFactors, LoraFileError, check_fits

KEY = "lora.frozen_adapter"


def frozen_adapter(
    config: RunConfig, goes_on_from: Path | None, say: Say = lambda _: None
) -> tuple[FrozenFile | None, dict[str, LoraFactors]]:
    """The file of `lora.frozen_adapter` and its adapters; (None, {}) if it is not set.

    `goes_on_from` is the checkpoint from which the run resumes; `say` gets a line for the log.

    Raises:
        LoraFileError: the file cannot be read, or belongs to another network.
        CheckpointError: the run has used another file so far, or none.
    """
    file, factors = None, dict[str, LoraFactors]()
    if config.lora.frozen_adapter is not None:
        path = Path(config.lora.frozen_adapter)
        factors = _read(path, config.lora, config.model, say)
        file = FrozenFile(path=path.resolve(), digest=_digest(factors))
        say(
            f"{KEY}={path}: adapters of {len(factors)} linears are added in training and in"
            " validation losses; pictures, generation and exports are without them"
        )
    if goes_on_from is not None and (before := adapters_of(goes_on_from)) is not None:
        _check_same(before.frozen, file, goes_on_from)
    return file, factors


def _read(path: Path, lora: LoraConfig, model: ModelConfig, say: Say) -> dict[str, LoraFactors]:
    from dit.lora.files import read_lora  # which most runs of adapters do not open

    ignored = say if lora.ignore_text_encoder else None
    try:
        read = read_lora(path, model, without_text_encoder=ignored)
    except LoraFileError as error:
        raise LoraFileError(f"{KEY}={path}: {error}") from error
    check_fits(read, model, place=f"{KEY}={path}")
    return read


def _digest(factors: Mapping[str, LoraFactors]) -> str:
    """Digest of the adapters' names and numbers, equal for all formats of one file."""
    found = hashlib.sha256()
    for name, one in sorted(factors.items()):
        found.update(f"{name} {one.alpha!r} {one.rank}".encode())
        for factor in (one.down, one.up):
            found.update(factor.contiguous().numpy().tobytes())
    return found.hexdigest()


def _check_same(before: FrozenFile | None, here: FrozenFile | None, start: Path) -> None:
    if before is None and here is None:
        return
    if before is not None and here is not None and before.digest == here.digest:
        return
    behind, remedy = "null", f"leave {KEY} out"
    if before is not None:
        behind = f"{before.path} (digest {before.digest[:12]})"
        remedy = f"name the same file, wherever it is now: {KEY}={before.path}"
    now = f"{here.path} (digest {here.digest[:12]})" if here else "null"
    raise CheckpointError(
        f"{start} was trained with {KEY}={behind}, but this run has {KEY}={now}; {remedy}. Or"
        " start a new run from its adapters, with another checkpoint.save:"
        f" checkpoint.finetune=true checkpoint.load={start}"
    )
