"""`lora.frozen_adapter`: a file of adapters that are added while others are trained beside them.

1. frozen_adapter  the file's factors, and what a checkpoint says of it
2. _check_same     whether it is the one that a run went on with so far

A training adapter was trained with plain targets on what a distilled network itself makes, and so
takes the distillation out of it. Adapters that are trained beside it, with plain targets, learn the
new data alone, and are used without it.

| on                                          | off                                        |
|---------------------------------------------|--------------------------------------------|
| training; passes without gradients, as they | pictures of a validation, generation,      |
| measure the network that is trained;        | exports, merged weights, checkpoints (they |
| validation losses                           | say which file it was)                     |
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
    """The file of `lora.frozen_adapter` and its adapters; None and {} where it is not set.

    `goes_on_from` is the checkpoint whose steps a run goes on with.

    Raises:
        LoraFileError: the file cannot be read, or is of another network.
        CheckpointError: the run has another file behind it, or none.
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
    """Digest of names and numbers, equal for all forms of the same file."""
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
    behind, remedy = "none", "leave it out"
    if before is not None:
        behind = f"{before.path} (digest {before.digest[:12]})"
        remedy = f"name the same file, wherever it is now: {KEY}={before.path}"
    now = f"{here.path} (digest {here.digest[:12]})" if here else "null"
    raise CheckpointError(
        f"{start} was trained with {KEY} {behind}, and here it is {now}; {remedy}. Or start a new"
        " run from its adapters, with another checkpoint.save: checkpoint.finetune=true"
        f" checkpoint.load={start}"
    )
