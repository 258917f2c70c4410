"""`lora.json` of a checkpoint: the adapters it holds, and the frozen weights they belong to.

1. AdapterRun   the content of the file
2. adapter_run  the adapters that a run trains, by its keys and the checkpoint it starts from
3. found_base   the present path of the frozen weights; checked_base: whether they are unchanged

Such a checkpoint has no frozen weights. Its `lora.json` says where they are:

{"base": {"path": "/runs/wan/checkpoints/step_00000000", "diffusers": false, "averaged": false,
          "digest": "…"},
 "adapters": {"blocks.0.attn1.to_q": {"rank": 16, "alpha": 16.0}}}

A base without a path was drawn from `rng.seed`, as on mock data. With `lora.frozen_adapter` the
file also has "frozen", with path and digest of that adapter's file (`dit.lora.frozen`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dit.checkpoint_paths import (
    ADAPTERS,
    CheckpointError,
    damaged,
    find_checkpoint,
    manifest_of,
    saved_config,
)
from dit.config import LoraConfig, ModelConfig, Problems, RunConfig, Weights
from dit.lora.factors import LoraFactors, check_fits, shapes_of
from dit.lora.targets import Adapters, chosen_adapters

Say = Callable[[str], None]
"""Function that writes a line to the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBase:
    """The frozen weights under adapters: path, digest, and whether they are the EMA."""

    path: Path | None  # of a checkpoint or Diffusers folder; None: drawn from the seed
    diffusers: bool = False
    averaged: bool  # whether they are the average of its weights
    digest: str  # of the checksums of its files


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenFile:
    """Path and digest of the file `lora.frozen_adapter`."""

    path: Path
    digest: str  # of its factors, whatever the form of the file


DRAWN = FrozenBase(path=None, averaged=False, digest="")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRun:
    """The adapters that a run trains, and the frozen weights under them."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    base: FrozenBase
    adapters: Adapters
    frozen: FrozenFile | None = None

    def as_json(self) -> str:
        """The content of `lora.json`."""
        content = asdict(self)
        if self.frozen is None:
            del content["frozen"]
        return json.dumps(content, indent=1, default=str) + "\n"


_FILE = TypeAdapter(AdapterRun)


def adapters_of(checkpoint: Path) -> AdapterRun | None:
    """The adapters of the checkpoint `checkpoint`; None if it has whole weights.

    Raises:
        CheckpointError: its `lora.json` is damaged.
    """
    file = checkpoint / ADAPTERS
    if not file.is_file():
        return None
    try:
        return _FILE.validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise damaged(file, error) from error


def adapter_run(config: RunConfig, start: Path | None, say: Say = lambda _: None) -> AdapterRun:
    """The adapters that a run trains; `start` is the checkpoint from which it starts.

    `say` gets lines for the log.

    Raises:
        CheckpointError: the frozen weights are missing or have changed; or the checkpoint has only
            adapters, and all weights are to be trained.
        Problems: a target matches no linear.
    """
    saved = adapters_of(start) if start is not None else None
    if not config.lora.enabled:
        raise CheckpointError(
            f"{start} holds only LoRA adapters, but lora.rank=null trains all weights. Set"
            " lora.rank as in the run that saved it, or start from the weights with the adapters"
            " added (`python -m dit.convert export --merged`, then checkpoint.load_hf)"
        )
    if start is not None and saved is not None:
        if saved.base.path is None:
            _check_drawn_alike(start, config)
        return replace(saved, base=found_base(saved.base, moved_to=config.lora.base))
    if config.lora.init_from is not None:
        adapters = shapes_of_file(config, say)
    else:
        adapters = chosen_adapters(config.model, config.lora)
    return AdapterRun(adapters=adapters, base=_first_base(config, start))


def _check_drawn_alike(start: Path, config: RunConfig) -> None:
    """Refuses settings that would draw other frozen weights than those of the checkpoint `start`.

    Raises:
        CheckpointError: seed or initialisation differ, and no file has the frozen weights.
    """
    before, here = (
        f"rng.seed={c.rng.seed}, model.init_method={c.model.init_method} and"
        f" model.init_method_std={c.model.init_method_std}"
        for c in (saved_config(start), config)
    )
    if before != here:
        raise CheckpointError(
            f"the frozen weights under the adapters of {start} are in no file: each start draws"
            f" them again. They were drawn with {before}, but this run has {here}; set these keys"
            " as they were"
        )


def factors_of_file(
    lora: LoraConfig,
    model: ModelConfig,
    say: Say = lambda _: None,
    *,
    place: str | None = None,
    key: str = "lora.init_from",
) -> dict[str, LoraFactors]:
    """The adapters in the file `lora.init_from`, or in the file `place` if there is one.

    `key` is the setting that names the file, for messages.

    Raises:
        LoraFileError: the file cannot be read, or belongs to another network.
    """
    named = place or lora.init_from
    assert named is not None
    from dit.lora.files import read_lora  # which most runs of adapters do not open

    file = Path(named)
    ignored = say if lora.ignore_text_encoder else None
    read = read_lora(file, model, without_text_encoder=ignored)
    check_fits(read, model, place=f"{key}={named}")
    return read


def shapes_of_file(config: RunConfig, say: Say = lambda _: None) -> Adapters:
    """Rank and alpha of each adapter in the file `lora.init_from`, by module.

    These values take the place of `lora.rank` and `lora.alpha`.

    Raises:
        LoraFileError: the file cannot be read, or belongs to another network.
        Problems: `lora.rank` or `lora.alpha` is set to another value.
    """
    shapes = shapes_of(factors_of_file(config.lora, config.model, say))
    for key, told in (("rank", config.lora.rank), ("alpha", config.lora.alpha)):
        here = sorted({getattr(shape, key) for shape in shapes.values()})
        if told is not None and here != [told]:
            raise Problems(
                [
                    f"lora.{key}={told:g} differs from the adapters of"
                    f" lora.init_from={config.lora.init_from}, which have"
                    f" {', '.join(f'{value:g}' for value in here)} and decide; leave lora.{key}"
                    " out"
                ]
            )
    return shapes


def check_told(adapters: Adapters, start: Path, config: RunConfig, say: Say) -> None:
    """Refuses a rank, an alpha or a file of adapters that differs from the checkpoint `start`.

    `adapters` are those of `start`. If `lora.targets` would choose other linears, `say` only logs
    that it is not used.

    Raises:
        Problems: names each setting that differs.
    """
    lora, wrong = config.lora, list[str]()
    for key, told in (("rank", lora.rank), ("alpha", lora.alpha)):
        here = sorted({getattr(shape, key) for shape in adapters.values()})
        if told is not None and told not in here:
            wrong.append(f"{key}={told:g} (these have {', '.join(f'{value:g}' for value in here)})")
    if lora.init_from is not None:
        wrong.append(f"init_from={lora.init_from} (a file of other adapters)")
    if wrong:
        raise Problems(
            [
                f"the run resumes with the adapters of {start}, but its configuration has"
                f" lora.{'; lora.'.join(wrong)}. Set lora.rank and lora.alpha as in that"
                " checkpoint and leave lora.init_from out, or merge these adapters and train new"
                " ones (`python -m dit.convert export --merged`, then checkpoint.load_hf)"
            ]
        )
    if chosen_adapters(config.model, lora).keys() != adapters.keys():
        say(f"the run resumes with the adapters of {start}, and lora.targets is not used")


def _first_base(config: RunConfig, start: Path | None) -> FrozenBase:
    """The frozen weights of a new run, which starts from the checkpoint `start` or from none.

    The digest of a Diffusers folder is empty at first: `checked_base` sets it.

    Raises:
        CheckpointError: the run has real data, and there are no weights to start from.
    """
    if start is not None:
        averaged = config.checkpoint.finetune_weights is Weights.EMA
        path = start.resolve()
        return FrozenBase(path=path, averaged=averaged, digest=digest_of(path))
    if config.checkpoint.load_hf is not None:
        path = Path(config.checkpoint.load_hf).resolve()
        return FrozenBase(path=path, diffusers=True, averaged=False, digest="")
    if not config.dataset.mock:
        raise CheckpointError(
            f"lora.rank={config.lora.rank} trains adapters on top of other weights, but the run"
            " has none: set checkpoint.load_hf to a Diffusers folder, or checkpoint.finetune=true"
            " and checkpoint.load to a checkpoint"
        )
    return DRAWN


def found_base(base: FrozenBase, *, moved_to: str | None) -> FrozenBase:
    """`base` with its present path: `moved_to`, or else the recorded one.

    Raises:
        CheckpointError: no such folder exists, or the files of a checkpoint have other checksums.
            Those of a Diffusers folder are left to `checked_base`.
    """
    if base.path is None:
        return base
    place = Path(moved_to) if moved_to else base.path
    if base.diffusers and place.is_dir():
        return replace(base, path=place.resolve())  # `checked_base` reads its files
    path = find_checkpoint(place) if place.is_dir() else None
    if path is None:
        raise CheckpointError(
            f"the frozen weights under the adapters are not at {place}; set lora.base to their"
            " present path (the same checkpoint or Diffusers folder)"
        )
    if (digest := digest_of(path)) != base.digest:
        raise _other_base(path, digest, base)
    return replace(base, path=path.resolve())


def checked_base(base: FrozenBase, digest: str) -> FrozenBase:
    """The Diffusers folder `base` with `digest`, that of its present files, as its digest.

    A checkpoint needs no such check, because loading compares its files with their checksums.

    Raises:
        CheckpointError: a digest was recorded, and the files have changed since.
    """
    if base.digest and digest != base.digest:
        assert base.path is not None
        raise _other_base(base.path, digest, base)
    return replace(base, digest=digest)


def _other_base(path: Path, digest: str, base: FrozenBase) -> CheckpointError:
    return CheckpointError(
        f"{path} holds other weights than the adapters were trained on (digest {digest[:12]}"
        f" instead of {base.digest[:12]}); set lora.base to the path of the original weights"
    )


def digest_of(checkpoint: Path) -> str:
    """Digest of the checksums in the manifest of `checkpoint`, without reading weights.

    Raises:
        CheckpointError: the checkpoint has no manifest.
    """
    manifest = manifest_of(checkpoint)
    if manifest is None:
        raise CheckpointError(
            f"{checkpoint} has no manifest.json with checksums, which tell a later run that these"
            " weights are unchanged; save it anew by a run of one step without adapters"
            f" (lora.rank=null checkpoint.finetune=true checkpoint.load={checkpoint}"
            " train.train_iters=1), and use the new checkpoint"
        )
    sums = {n: d.sha256 for n, d in manifest.files.items() if n.endswith((".distcp", ".metadata"))}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
