"""Runs and checkpoints of adapters: which there are, and which frozen weights they stand beside.

1. AdapterRun     what `lora.json` in a checkpoint says
2. adapter_run    what a run trains, by its keys and what it starts from
3. AdapterStart   the same with the frozen weights, for a start: first values, loading, checks
4. load_adapted   a checkpoint of adapters, with its base, into a network that generates

Such a checkpoint has no frozen weight. `lora.json` in it says where they are:

{"base": {"path": "/runs/wan/checkpoints/step_00000000", "diffusers": false, "averaged": false,
          "digest": "…"},
 "adapters": {"blocks.0.attn1.to_q": {"rank": 16, "alpha": 16.0}}}

A base without a path was drawn from `rng.seed`, as on mock data. Only runs of adapters import this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch.distributed import ProcessGroup

from dit.config import Problems, RunConfig, Weights
from dit.distributed.collective_errors import from_first_rank
from dit.distributed.watchdog import heartbeat
from dit.lora.factors import LoraFactors, check_fits, shapes_of, to_stored
from dit.lora.files import read_lora
from dit.lora.targets import Adapters, adapters_by_linear, attach_adapters, chosen_adapters
from dit.models.layers.adaptable import is_adapter
from dit.train.checkpoint.paths import (
    ADAPTERS,
    CheckpointError,
    damaged,
    find_checkpoint,
    has_adapters,
    manifest_of,
    saved_config,
    verify,
)
from dit.train.checkpoint.state_dict import check_average, check_same_weights, load_weights
from dit.train.model_and_optimizer import (
    Fill,
    draw_weights,
    initialise,
    initialise_weights,
    leave_to_checkpoint,
)
from dit.train.train_state import ReadFolder, Start

Say = Callable[[str], None]
"""Takes a line about keys of `lora.init_from` that are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBase:
    """The weights that adapters are trained beside."""

    path: Path | None  # of a checkpoint or Diffusers folder; None: drawn from the seed
    diffusers: bool = False
    averaged: bool  # whether they are the average of its weights
    digest: str  # of the checksums of its files


DRAWN = FrozenBase(path=None, averaged=False, digest="")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRun:
    """What a run of adapters trains, and beside what."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    base: FrozenBase
    adapters: Adapters

    def as_json(self) -> str:
        """The content of `lora.json`."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"


_FILE = TypeAdapter(AdapterRun)


def adapters_of(checkpoint: Path) -> AdapterRun | None:
    """What a checkpoint says of its adapters; None where it has whole weights.

    Raises:
        CheckpointError: its file is damaged.
    """
    file = checkpoint / ADAPTERS
    if not file.is_file():
        return None
    try:
        return _FILE.validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise damaged(file, error) from error


def adapter_run(config: RunConfig, start: Path | None, say: Say = lambda _: None) -> AdapterRun:
    """What a run of adapters trains. `start` is the checkpoint that it starts from.

    Raises:
        CheckpointError: the frozen weights are nowhere, or others than they were; or there are
            adapters alone, and all weights are to be trained.
        Problems: a target matches no linear.
    """
    saved = adapters_of(start) if start is not None else None
    if not config.lora.enabled:
        raise CheckpointError(
            f"{start} holds LoRA adapters and no weights, and lora.rank is null, which trains"
            " all weights: set lora.rank as it was, or start from the weights with the adapters"
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
    """Refuses another seed where it would draw other frozen weights.

    Raises:
        CheckpointError: the checkpoint has adapters beside weights that are in no file.
    """
    drawn = [(c.rng.seed, c.model.init_method_std) for c in (saved_config(start), config)]
    if drawn[0] != drawn[1]:
        (seed, std), (seed_here, std_here) = drawn
        raise CheckpointError(
            f"{start} holds adapters beside weights that are in no file but drawn anew at each"
            f" start: by rng.seed={seed} and model.init_method_std={std}, and here by"
            f" rng.seed={seed_here} and model.init_method_std={std_here}; set them back"
        )


def factors_of_file(config: RunConfig, say: Say = lambda _: None) -> dict[str, LoraFactors]:
    """The adapters of `lora.init_from`.

    Raises:
        LoraFileError: the file cannot be read, or is of another network.
    """
    assert config.lora.init_from is not None
    place = Path(config.lora.init_from)
    ignored = say if config.lora.ignore_text_encoder else None
    read = read_lora(place, config.model, without_text_encoder=ignored)
    check_fits(read, config.model, place=f"lora.init_from={place}")
    return read


def shapes_of_file(config: RunConfig, say: Say = lambda _: None) -> Adapters:
    """Ranks and alphas of `lora.init_from`, which rule.

    Raises:
        LoraFileError: the file cannot be read, or is of another network.
        Problems: `lora.rank` or `lora.alpha` says otherwise.
    """
    shapes = shapes_of(factors_of_file(config, say))
    for key, told in (("rank", config.lora.rank), ("alpha", config.lora.alpha)):
        here = sorted({getattr(shape, key) for shape in shapes.values()})
        if told is not None and here != [told]:
            raise Problems(
                [
                    f"lora.{key}={told:g}: the adapters of lora.init_from={config.lora.init_from}"
                    f" have {', '.join(f'{value:g}' for value in here)}, and they rule; leave it"
                    " out"
                ]
            )
    return shapes


def _first_base(config: RunConfig, start: Path | None) -> FrozenBase:
    """The frozen weights of a run that begins."""
    if start is not None:
        averaged = config.checkpoint.finetune_weights is Weights.EMA
        path = start.resolve()
        return FrozenBase(path=path, averaged=averaged, digest=digest_of(path))
    if config.checkpoint.load_hf is not None:
        path = Path(config.checkpoint.load_hf).resolve()
        return FrozenBase(path=path, diffusers=True, averaged=False, digest="")
    if not config.dataset.mock:
        raise CheckpointError(
            f"lora.rank={config.lora.rank} trains adapters beside weights, and there are none: set"
            " checkpoint.load_hf to a Diffusers folder, or checkpoint.finetune=true and"
            " checkpoint.load to a checkpoint"
        )
    return DRAWN


def found_base(base: FrozenBase, *, moved_to: str | None) -> FrozenBase:
    """The same base where it is now.

    Raises:
        CheckpointError: it is not there, or its files have other checksums.
    """
    if base.path is None:
        return base
    place = Path(moved_to) if moved_to else base.path
    if base.diffusers and place.is_dir():
        return replace(base, path=place.resolve())  # `checked_base` reads its files
    path = find_checkpoint(place) if place.is_dir() else None
    if path is None:
        raise CheckpointError(
            f"the frozen weights of the adapters are not at {place}; say where they are now:"
            " lora.base=PATH, the same checkpoint or Diffusers folder"
        )
    if (digest := digest_of(path)) != base.digest:
        raise _other_base(path, digest, base)
    return replace(base, path=path.resolve())


def opened_folder(
    base: FrozenBase, config: RunConfig, read_folder: ReadFolder | None
) -> Start | None:
    """The Diffusers folder of a base; None for other bases.

    Raises:
        ConvertError: it is damaged, or of another network.
        ValueError: the program that calls has nothing to read it with.
    """
    if base.path is None or not base.diffusers:
        return None
    if read_folder is None:
        raise ValueError(
            f"the frozen weights are those of the Diffusers folder {base.path}, which this program"
            " does not read; recipes/pretrain_dit.py does"
        )
    return read_folder(base.path, config)


def checked_base(base: FrozenBase, folder: Start | None) -> FrozenBase:
    """A base with its digest, which is compared where it is known; all ranks call it.

    They share the reading of `folder`. A checkpoint has checksums, which loading compares with its
    files.

    Raises:
        CheckpointError: the files are others than they were.
    """
    if folder is None:
        return base
    digest = folder.origin().digest
    if base.digest and digest != base.digest:
        assert base.path is not None
        raise _other_base(base.path, digest, base)
    return replace(base, digest=digest)


def _other_base(path: Path, digest: str, base: FrozenBase) -> CheckpointError:
    return CheckpointError(
        f"{path} holds other weights than those that the adapters were trained beside (digest"
        f" {digest[:12]} instead of {base.digest[:12]}); lora.base=PATH names the right ones"
    )


def digest_of(checkpoint: Path) -> str:
    """Of the checksums in a manifest, of the files with weights; the files are not read.

    Raises:
        CheckpointError: the checkpoint has no manifest.
    """
    manifest = manifest_of(checkpoint)
    if manifest is None:
        raise CheckpointError(
            f"{checkpoint} has no manifest.json, so that nobody can tell later whether its weights"
            " are the same; load it once with checkpoint.finetune=true and train.train_iters=1, and"
            " take the new checkpoint"
        )
    sums = {n: d.sha256 for n, d in manifest.files.items() if n.endswith((".distcp", ".metadata"))}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterStart:
    """A run of adapters at its start, with the frozen weights at hand."""

    run: AdapterRun
    folder: Start | None  # the frozen weights, where they are a Diffusers folder
    begins: bool  # whether the adapters are new, and in no checkpoint

    def first_values(self, config: RunConfig, given: Fill | None = None) -> Fill:
        """What fills a new model, before its frozen weights are loaded; `given` replaces it."""
        fill = initialise_adapters if self.begins else leave_to_checkpoint
        if self.run.base.path is None:  # in no file: drawn again, as at the first start
            fill = initialise_weights
        fill = given or fill
        new = self.begins and config.lora.init_from is not None
        return _then_from_file(fill) if new else fill

    def load_base(
        self, modules: Sequence[MegatronModule], config: RunConfig, groups: ProcessGroupCollection
    ) -> None:
        """Loads the frozen weights; all ranks call it.

        Raises:
            CheckpointError: a file has changed since it was saved, or they are of another model.
        """
        heartbeat("load of the frozen weights")
        if self.folder is not None:
            for module in modules:
                self.folder.fill(module, config)
        elif (path := self.run.base.path) is not None:
            check_base(self.run.base, config)
            verify(path)
            load_weights(path, modules, groups, averaged=self.run.base.averaged)


def initialise_adapters(model: Any, config: RunConfig) -> None:
    """Fills in adapters alone, whose base comes from a file; all data ranks call it."""
    copies = model.groups.dp_cp
    initialise(model, seed=config.rng.seed, std=None, copies=copies, chosen=is_adapter)


def _then_from_file(fill: Fill) -> Fill:
    """After `fill`, adapters get the values of `lora.init_from`.

    All ranks call it; the first one reads the file for them.
    """

    def filled(model: Any, config: RunConfig) -> None:
        fill(model, config)
        read = from_first_rank(lambda: factors_of_file(config))
        draw_adapters(model, read, copies=model.groups.dp_cp)

    return filled


def adapters_at_start(
    config: RunConfig, start: Path | None, read_folder: ReadFolder | None, say: Say
) -> AdapterStart:
    """`adapter_run` of the first rank, its base with its digest; all ranks call it.

    Raises:
        ValueError: as `adapter_run`, `opened_folder` and `checked_base`.
    """
    run = from_first_rank(lambda: adapter_run(config, start, say))
    folder = opened_folder(run.base, config, read_folder)
    run = replace(run, base=checked_base(run.base, folder))
    return AdapterStart(run=run, folder=folder, begins=not has_adapters(start))


def check_adapters(
    config: RunConfig, start: Path | None, read_folder: ReadFolder | None
) -> list[str]:
    """What `adapters_at_start` and loading refuse, but for checksums; lines that a start says.

    Raises:
        ValueError: as these.
    """
    said: list[str] = []
    run = adapter_run(config, start, said.append)
    adapters_by_linear(config.model, run.adapters)
    if opened_folder(run.base, config, read_folder) is None:
        check_base(run.base, config)
    return said


def check_base(base: FrozenBase, config: RunConfig) -> None:
    """Refuses the frozen weights of a checkpoint that do not fit; reads no tensor.

    Raises:
        CheckpointError: they are of another model, or their average is missing.
    """
    if base.path is not None:
        check_same_weights(base.path, config)
        check_average(base.path, averaged=base.averaged)


def load_adapted(
    path: Path,
    network: Any,
    groups: ProcessGroupCollection,
    *,
    averaged: bool,
    read_folder: ReadFolder | None = None,
) -> None:
    """Loads a checkpoint of adapters and its base into a new network; all ranks call it.

    Raises:
        CheckpointError: as `load_weights`, or the base is missing or in no file.
    """
    run = adapters_of(path)
    if run is None or run.base.path is None:
        raise CheckpointError(
            f"{path} holds adapters beside weights that were drawn from a seed, as on mock"
            " data, and are in no file: they show nothing; train on a dataset, beside weights"
            " of checkpoint.load_hf or checkpoint.load"
        )
    config, run = saved_config(path), replace(run, base=found_base(run.base, moved_to=None))
    folder = opened_folder(run.base, config, read_folder)
    AdapterStart(run=run, folder=folder, begins=False).load_base([network], config, groups)
    precision = config.lora.dtype or config.model.precision
    attach_adapters(network, run.adapters, precision=precision)
    load_weights(path, [network], groups, averaged=averaged)


def draw_adapters(
    network: Any, factors: Mapping[str, LoraFactors], *, copies: ProcessGroup | None = None
) -> None:
    """Gives the adapters of a network the values of `factors`; all ranks call it."""
    stored = to_stored(factors, network.model)
    draw_weights(network, lambda name, *_: stored[name], seed=0, copies=copies, chosen=is_adapter)
