"""Step 3 of a run's start: chooses trained weights, their base and checkpoint, and the run folder.

1. Start         the start of one network; `STARTS` has one for each network
2. choose_start  run folder, mirror, and the starts of all networks
3. run_folder    creates and locks the folder
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import torch.distributed as dist

from dit.checkpoint_paths import has_adapters
from dit.config import CheckpointConfig, RunConfig
from dit.distributed.collective_errors import from_first_rank
from dit.safe_writing import FolderInUseError, only_writer
from dit.system_errors import explained
from dit.train.checkpoint.starting_point import (
    StartingPoint,
    check_writable,
    starting_point,
    unwritable,
)
from dit.train.checkpoint.without_tensors import CRITIC
from dit.train.model_and_optimizer import Initialise, initialise_weights, leave_to_checkpoint
from dit.train.opening.machine import Machine
from dit.train.train_state import InitialWeights, ReadFolder

if TYPE_CHECKING:
    from dit.train.checkpoint.adapters import AdapterStart

NETWORK = "network"
"""Name of the main network in `STARTS`: the only network, or the student."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Weights and functions that a program passes to a run besides its configuration."""

    weights: InitialWeights | None = None  # weights from which a new network starts
    read_folder: ReadFolder | None = None  # opens a Diffusers folder of frozen weights
    fill: Initialise | None = None  # replaces the first values, in runs where they do not matter


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Sources of a network's trained weights and of their base, and the checkpoint it starts from.

    If all weights are trained, they come from the checkpoint, else from a Diffusers folder, or are
    random. If adapters are trained, their base (`AdapterRun.base`) has one of these three sources.
    """

    point: StartingPoint
    weights: InitialWeights | None  # of a Diffusers folder
    adapters: AdapterStart | None  # the adapters and their base; None: all weights are trained
    fill: Initialise  # gives a new model its first values


Networks = Mapping[str, Start]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Starts:
    """The starts of all networks of a run, by name, and the run folder."""

    folder: Path | None  # the locked run folder; None: the run writes nothing
    networks: Networks
    teacher: AdapterStart | None  # weights of `distill.teacher`; None if the key is not set
    notes: tuple[str, ...]


def choose_start(machine: Machine, given: Given, ends: ExitStack) -> Starts:
    """Locks the run folder until `ends` closes, and chooses the start of each network.

    All ranks call it. An empty folder first gets the newest checkpoint of the mirror.

    Raises:
        ValueError: the folder cannot be written, or there is nothing to start from.
    """
    config, notes = machine.config, list[str]()
    folder = ends.enter_context(run_folder(config.checkpoint.save))
    notes += from_first_rank(lambda: _fetched(config.checkpoint))
    networks = _starts_of_networks(config, given, notes.append)
    teacher = _start_of_teacher(config, given)
    return Starts(folder=folder, networks=networks, teacher=teacher, notes=tuple(notes))


def _fetched(checkpoint: CheckpointConfig) -> list[str]:
    if not checkpoint.mirror:
        return []
    from dit.train.checkpoint.mirror import restored

    return restored(checkpoint)


def _starts_of_networks(config: RunConfig, given: Given, say: Say) -> Networks:
    found: dict[str, Start] = {}
    for name, start_of in STARTS.items():
        if (start := start_of(config, given, found, say)) is not None:
            found[name] = start
    return found


def start_of_network(config: RunConfig, given: Given, _: Networks, say: Say) -> Start:
    """The start of the main network; `say` gets lines for the log."""
    # Drawing takes minutes for a large model; all ranks must agree on it.
    point = from_first_rank(lambda: starting_point(config.checkpoint))
    if not (config.lora.enabled or has_adapters(point.checkpoint)):
        fill = given.fill or _stored_values(config.checkpoint.load_hf, point, given.weights)
        fill = fill or partial(initialise_weights, config=config)
        return Start(point=point, weights=given.weights, adapters=None, fill=fill)
    from dit.train.checkpoint.adapters import adapters_at_start

    adapters = adapters_at_start(config, point, given.read_folder, say)
    fill = adapters.first_values(config, given.fill)
    return Start(point=point, weights=given.weights, adapters=adapters, fill=fill)


def start_of_critic(config: RunConfig, given: Given, before: Networks, _: Say) -> Start | None:
    """The start of DMD's critic; None for a run without critic.

    Its weights are those of the checkpoint on a resume, else of `distill.critic_load` or the
    teacher. If the student has adapters, the critic has its own on the same base; else it is a
    whole network.

    Raises:
        ValueError: `distill.critic_load` holds no weights that fit.
    """
    if not config.has_critic:
        return None
    student = before[NETWORK]
    if student.point.continued is not None:
        return replace(student, fill=leave_to_checkpoint)
    from dit.train.distill.critic import fill_of_critic

    fill = fill_of_critic(config, student.adapters, given.read_folder)
    begun = student.adapters and replace(student.adapters, begins=True)
    return replace(student, point=StartingPoint(), adapters=begun, fill=fill)


STARTS: Mapping[str, Callable[[RunConfig, Given, Networks, Say], Start | None]] = {
    NETWORK: start_of_network,
    CRITIC: start_of_critic,
}
"""Function for each network, by name, that returns its start, or None if the run has no such
network. Its arguments are configuration, given weights, starts of earlier networks, and `say`."""


def _start_of_teacher(config: RunConfig, given: Given) -> AdapterStart | None:
    if config.distill.teacher is None:
        return None
    from dit.train.distill.teacher import teacher_start

    return teacher_start(config, given.read_folder)


def _stored_values(
    load_hf: str | None, point: StartingPoint, weights: InitialWeights | None
) -> Initialise | None:
    """The function that fills a model whose weights are all trained; None if they are random.

    Raises:
        ValueError: `load_hf` is set, and the program has not passed its `weights`.
    """
    if point.checkpoint is not None:
        return leave_to_checkpoint
    if weights is not None:
        return weights.fill
    if load_hf is not None:
        raise ValueError(
            f"checkpoint.load_hf={load_hf} is read only by recipes/pretrain_dit.py; start the run"
            " with that program, or leave the key out"
        )
    return None


@contextmanager
def run_folder(save: str | None) -> Iterator[Path | None]:
    """A context in which `checkpoint.save` exists and is locked; all ranks call it.

    Yields None if the run writes nothing.

    Raises:
        FolderInUseError: another run writes to it.
        ValueError: the folder cannot be written, or holds shards.
    """
    if not save:
        yield None
        return
    folder = Path(save)
    _make_run_folder(folder)
    with ExitStack() as held:
        refusal = _lock(folder, held) if dist.get_rank() == 0 else ""
        refusals: list[str] = [refusal]
        dist.broadcast_object_list(refusals, src=0)
        if refusals[0]:  # raised on all ranks
            raise FolderInUseError(refusals[0])
        yield folder


def _make_run_folder(folder: Path) -> None:
    check_writable(folder)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(folder, explained(error)) from error


def _lock(folder: Path, held: ExitStack) -> str:
    """Locks `folder` until `held` closes; returns the reason if that fails."""
    try:
        held.enter_context(only_writer(folder, named=f"checkpoint.save={folder}"))
    except (FolderInUseError, OSError) as error:
        return explained(error)
    return ""
