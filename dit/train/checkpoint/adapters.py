"""Start of a run with adapters: frozen weights, initial values, checks; and loading for generation.

1. AdapterStart  the adapters that a run trains (`dit.lora.checkpoint`), with its frozen weights
2. load_adapted  loads a checkpoint's adapters, and the base that it names, into a network
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from dit.checkpoint_paths import CheckpointError, has_adapters, saved_config, verify
from dit.config import LoraConfig, LoraStreams, ModelConfig, Problems, RunConfig
from dit.data.preflight import lacks_sound
from dit.distributed.collective_errors import from_first_rank
from dit.distributed.watchdog import heartbeat
from dit.lora.checkpoint import (
    AdapterRun,
    FrozenBase,
    Say,
    adapter_run,
    adapters_of,
    check_told,
    checked_base,
    factors_of_file,
    found_base,
)
from dit.lora.factors import LoraFactors, shapes_of, to_stored
from dit.lora.frozen import frozen_adapter
from dit.lora.targets import Adapters, adapters_by_linear, attach_adapters
from dit.models.layers.adaptable import CHILD, FROZEN, is_adapter
from dit.models.registry import has_sound
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.sizing.passes import absent_data
from dit.train.checkpoint.starting_point import StartingPoint
from dit.train.checkpoint.state_dict import load_weights
from dit.train.checkpoint.without_tensors import check_average, check_same_weights
from dit.train.model_and_optimizer import (
    Initialise,
    draw_weights,
    initialise,
    initialise_weights,
    leave_to_checkpoint,
)
from dit.train.train_state import InitialWeights, ReadFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterStart:
    """Adapters that a run trains and the frozen weights under them, at the start of the run."""

    run: AdapterRun
    folder: InitialWeights | None  # the frozen weights, if they are in a Diffusers folder
    begins: bool  # whether the adapters are new: in no checkpoint yet
    frozen: Mapping[str, LoraFactors] = field(default_factory=dict)  # lora.frozen_adapter

    @property
    def frozen_shapes(self) -> Adapters:
        """Ranks and alphas of `lora.frozen_adapter`."""
        return shapes_of(self.frozen)

    def first_values(self, config: RunConfig, given: Initialise | None = None) -> Initialise:
        """The function that fills a new model, before `load_base` loads its frozen weights.

        `given` replaces the function that this start would choose. New adapters are then set from
        `lora.init_from`, if that is set.
        """
        fill = leave_to_checkpoint
        if self.begins:
            fill = partial(initialise_adapters, seed=config.rng.seed)
        if self.run.base.path is None:  # frozen weights in no file: drawn again, as at first
            fill = partial(initialise_weights, config=config)
        fill = given or fill
        new = self.begins and config.lora.init_from is not None
        return partial(_then_from_file, fill, config.lora, config.model) if new else fill

    def load_base(
        self,
        modules: Sequence[StackedTransformer],
        model: ModelConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        """Loads the frozen weights, and a frozen adapter if set, into `modules`; all ranks call it.

        Raises:
            CheckpointError: a file has changed since it was saved, or belongs to another model.
        """
        heartbeat("load of the frozen weights")
        if self.folder is not None:
            for module in modules:
                self.folder.fill(module)
        elif (path := self.run.base.path) is not None:
            check_base(self.run.base, model)
            verify(path)
            load_weights(path, modules, groups, averaged=self.run.base.averaged)
        for module in modules if self.frozen else ():
            draw_adapters(module, self.frozen, copies=groups.dp_cp, adapter=FROZEN)


def initialise_adapters(model: StackedTransformer, seed: int) -> None:
    """Initialises only the adapters of `model`; all data ranks call it."""
    copies = model.groups.dp_cp
    initialise(model, seed=seed, std=None, copies=copies, chosen=is_adapter)


def _then_from_file(
    fill: Initialise, lora: LoraConfig, model: ModelConfig, module: StackedTransformer
) -> None:
    """Fills `module` by `fill`, then sets its adapters to those of the file `lora.init_from`.

    All ranks call it; the first rank reads the file for them.
    """
    fill(module)
    read = from_first_rank(lambda: factors_of_file(lora, model))
    draw_adapters(module, read, copies=module.groups.dp_cp)


def opened_folder(
    base: FrozenBase, model: ModelConfig, read_folder: ReadFolder | None
) -> InitialWeights | None:
    """The Diffusers folder that `base` names, opened by `read_folder`; None if it names none.

    Raises:
        ConvertError: the folder is damaged, or belongs to another network.
    """
    if base.path is None or not base.diffusers:
        return None
    assert read_folder is not None, "a program that trains adapters hands it down"
    return read_folder(base.path, model)


def adapters_at_start(
    config: RunConfig, start: StartingPoint, read_folder: ReadFolder | None, say: Say
) -> AdapterStart:
    """The start of a run with adapters, with checksums of its base; all ranks call it.

    The first rank reads the files, and `say` gets lines for the log.

    Raises:
        ValueError: the base or a file of adapters is missing or damaged, has changed since the
            checkpoint, or does not fit the network.
    """
    run = from_first_rank(lambda: _adapter_run(config, start, say))
    file, frozen = from_first_rank(lambda: frozen_adapter(config, start.continued, say))
    run = replace(run, frozen=file)
    folder = opened_folder(run.base, config.model, read_folder)
    if folder is not None:
        run = replace(run, base=checked_base(run.base, folder.origin().digest))
    begins = not has_adapters(start.checkpoint)
    return AdapterStart(run=run, folder=folder, begins=begins, frozen=frozen)


def _adapter_run(config: RunConfig, start: StartingPoint, say: Say) -> AdapterRun:
    """The adapters of the run; `say` gets lines for the log.

    Raises:
        ValueError: the frozen weights or a file of adapters are missing or do not fit, or settings
            contradict the adapters of a checkpoint or the data.
    """
    before = start.checkpoint
    if not (before is not None and has_adapters(before)):
        config = of_heard_streams(config, say)
    run = adapter_run(config, before, say)
    if before is not None and has_adapters(before) and not start.goes_on:
        check_told(run.adapters, before, config, say)
    return run


def of_heard_streams(config: RunConfig, say: Say) -> RunConfig:
    """The configuration with `lora.streams=video` if the network has sound but no sample has.

    Otherwise every export would hold sound adapters that were never trained.

    Raises:
        Problems: `lora.streams` is `sound`, and no sample has sound.
        DataError: a dataset or its card is missing or damaged.
    """
    lora, of = config.lora, config.dataset
    chosen = lora.enabled and lora.init_from is None and lora.streams is not LoraStreams.VIDEO
    if not (chosen and has_sound(config.model)) or absent_data(config) or not lacks_sound(of):
        return config
    if lora.streams is LoraStreams.SOUND:
        raise Problems(
            [
                "lora.streams=sound: no sample of the dataset has a sound, so no adapter would"
                " learn; pack sound (docs/sound.md), or set lora.streams=video"
            ]
        )
    say("no sample has a sound: adapters are only in the layers of frames (lora.streams=video)")
    return replace(config, lora=replace(lora, streams=LoraStreams.VIDEO))


def check_adapters(
    config: RunConfig, start: StartingPoint, read_folder: ReadFolder | None
) -> tuple[list[str], Adapters]:
    """Checks the start of a run with adapters; returns log lines, and the adapters it trains.

    The checks are those of `adapters_at_start` and `AdapterStart.load_base`, without checksums.

    Raises:
        ValueError: the base or a file of adapters is missing or damaged, or does not fit the
            network.
    """
    said: list[str] = []
    run = _adapter_run(config, start, said.append)
    adapters_by_linear(config.model, run.adapters)
    frozen_adapter(config, start.continued, said.append)
    if opened_folder(run.base, config.model, read_folder) is None:
        check_base(run.base, config.model)
    return said, run.adapters


def check_base(base: FrozenBase, model: ModelConfig) -> None:
    """Refuses frozen weights `base` from a checkpoint if they do not fit `model`; reads no tensors.

    Raises:
        CheckpointError: the weights belong to another model, or their EMA is missing.
    """
    if base.path is not None:
        check_same_weights(base.path, model)
        check_average(base.path, averaged=base.averaged)


def load_adapted(
    path: Path,
    network: StackedTransformer,
    groups: ProcessGroupCollection,
    *,
    averaged: bool,
    read_folder: ReadFolder,
) -> None:
    """Loads a checkpoint of adapters and its base into a new network; all ranks call it.

    `averaged` loads the EMA of the adapters. `read_folder` opens a base that is a Diffusers folder.

    Raises:
        CheckpointError: the checkpoint has no EMA although `averaged` is set, or its base is
            missing or in no file.
    """
    run = adapters_of(path)
    if run is None or run.base.path is None:
        raise CheckpointError(
            f"{path} holds adapters of frozen weights that are in no file: they were drawn at"
            " random, as in a run on mock data. To generate, train adapters on a dataset, with"
            " checkpoint.load_hf or checkpoint.load"
        )
    config, run = saved_config(path), replace(run, base=found_base(run.base, moved_to=None))
    folder = opened_folder(run.base, config.model, read_folder)
    start = AdapterStart(run=run, folder=folder, begins=False)
    start.load_base([network], config.model, groups)
    precision = config.lora.dtype or config.model.precision
    attach_adapters(network, run.adapters, precision=precision)
    load_weights(path, [network], groups, averaged=averaged)


def draw_adapters(
    network: StackedTransformer,
    factors: Mapping[str, LoraFactors],
    *,
    copies: ProcessGroup | None = None,
    adapter: str = CHILD,
) -> None:
    """Sets the adapters called `adapter` in `network` to `factors`; all ranks call it."""
    stored = to_stored(factors, network.model, adapter=adapter)
    own: Any = {"copies": copies, "chosen": stored.__contains__}
    draw_weights(network, lambda name, *_: stored[name], seed=0, **own)
