"""Step 2 of a run's start: opens the data, before a network is built or a file is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dit.batch import NullInputs
from dit.config import RunConfig
from dit.data import (
    PackLoader,
    ValidationPacks,
    build_train_loader,
    check_data,
    dataset_card,
    null_inputs,
)
from dit.distributed.collective_errors import from_first_rank
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.sizing.flops import work_of_packs
from dit.sizing.passes import fill_line, forecast_packs, passes_line, route_lines
from dit.train.opening.machine import Machine
from dit.train.validation import read_validation_packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The opened data of a run, on this rank."""

    replica: Replica
    loader: PackLoader | None  # on the rank that reads for its replica
    validation: Mapping[str, ValidationPacks]  # of this replica, by the name of the loss
    null: NullInputs  # the inputs of a sample without caption
    card: dict[str, Any] | None  # how to decode the data; mock data has none
    notes: tuple[str, ...]


def open_data(machine: Machine) -> Data:
    """Opens the data of a run; all ranks call it.

    Raises:
        ValueError: the data are missing, damaged, or do not fit the network.
    """
    heartbeat("opening of the data")
    config, replica = machine.config, Replica(machine.groups)
    notes = from_first_rank(lambda: data_notes(config))
    ranks: dict[str, int] = {
        "rank": machine.groups.dp.rank(),
        "world_size": machine.groups.dp.size(),
    }
    work = work_of_packs(config.model, config.dataset)
    loader = build_train_loader(config, **ranks, work=work) if replica.reads else None
    return Data(
        replica=replica,
        loader=loader,
        validation=read_validation_packs(config, replica, **ranks),
        null=null_inputs(config, device()),
        card=dataset_card(config),
        notes=notes,
    )


def data_notes(config: RunConfig) -> tuple[str, ...]:
    """Log lines on the data: dataset cards, passes over each sample, fill of packs, and routes.

    Raises:
        DataError: data are missing or damaged, or do not fit the model.
    """
    notes, forecast = check_data(config).notes, forecast_packs(config)
    lines = [line for of in (passes_line, fill_line) if (line := of(config, forecast))]
    return (*notes, *lines, *route_lines(config, forecast))
