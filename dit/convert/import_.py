"""Diffusers folder -> a checkpoint that a run can start from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from dit.config import Precision, RunConfig
from dit.config.loading import save_config
from dit.convert.atomic_folder import new_folder, share
from dit.convert.diffusers_checkpoint import CONFIG, DiffusersFolder, in_groups, open_folder
from dit.convert.diffusers_config import Unsaid, model_config, objective_config
from dit.convert.errors import ConvertError, listed
from dit.convert.megatron_checkpoint import Piece, write_file, write_index
from dit.distributed.collective_errors import on_first_rank
from dit.models.cost import network_cost
from dit.models.diffusers_names import Pair, pairs
from dit.train.checkpoint.manifest import Sealed, seal, write_manifest

_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that holds the weights of a Diffusers folder."""

    path: Path
    config: RunConfig
    tensors: int  # of Diffusers
    objective_note: str  # where the objective in `config` comes from
    precision_note: str  # where its precision comes from


@dataclass(frozen=True, slots=True)
class _WrittenTensor:
    file: str
    results: list[WriteResult]
    sealed: Sealed
    not_finite: list[str]  # names of Diffusers' tensors


def import_weights(
    hf_path: Path,
    target: Path,
    *,
    text_pad_to: int | Unsaid | None = Unsaid.UNSAID,
    objective: Sequence[str] = (),
) -> Imported:
    """Writes the checkpoint `target`, each tensor in the type that it has in `hf_path`.

    `text_pad_to` is what weights were trained with that somebody else exported; where nothing is
    said, as their family's published ones. `objective` is what the user says of their objective,
    such as `objective.name=flow`. All processes call it and share the files.

    Raises:
        ConvertError: the folder is not what its config.json says or holds another kind of model or
            numbers that are not finite, or `target` exists or cannot be written.
        ConfigError: `objective` is not understood.
    """
    source = open_folder(hf_path)
    stored = _stored_precision(source)
    model = model_config(
        source.config,
        precision=stored.precision,
        text_pad_to=text_pad_to,
        place=source.path / CONFIG,
    )
    found = objective_config(source.scheduler, place=source.scheduler_file, given=objective)
    config = RunConfig(model=model, objective=found.objective)
    if network_cost(model).layers > len(source.headers):  # before each of them is spelled out
        raise ConvertError(
            f"{source.path / CONFIG} says num_layers={model.num_layers}, but there are only"
            f" {len(source.headers)} tensors beside it"
        )
    table = pairs(model)
    source.check(table)
    dtypes = _dtypes(source, table)
    sizes = [_bytes(source, pair) for pair in table]
    each = sum(sizes) // dist.get_world_size() + max(sizes)  # something for each process
    groups = in_groups(sizes, most=min(each, _FILE_BYTES))
    with new_folder(target, option="--megatron-path") as folder:

        def write(number: int) -> _WrittenTensor:
            file = folder / f"__{number}_0.distcp"
            not_finite: list[str] = []
            members = [table[i] for i in groups[number]]
            results = write_file(file, _pieces(source, members, not_finite))
            return _WrittenTensor(file.name, results, seal(file), not_finite)

        written: list[_WrittenTensor] = share(write, len(groups))  # type: ignore[assignment]

        if wrong := [name for w in written for name in w.not_finite]:
            raise ConvertError(
                f"{source.headers[wrong[0]].file} has NaN or Inf in {listed(wrong)}; a network with"
                " them computes nothing else: download it or export it again"
            )

        def finish() -> None:
            write_index(folder, table, dtypes, [r for w in written for r in w.results])
            save_config(config, folder / "config.yaml")
            write_manifest(folder, {w.file: w.sealed for w in written})

        on_first_rank(finish)
    return Imported(target, config, len(source.headers), found.note, stored.note)


class _Precision(NamedTuple):
    precision: Precision
    note: str


def _stored_precision(source: DiffusersFolder) -> _Precision:
    """bfloat16 where most numbers are stored so, else float32.

    Not where all are: Diffusers itself keeps `learnable_pos_embed` in float32 when it saves a model
    in bfloat16.
    """
    numbers = Counter[torch.dtype]()
    for header in source.headers.values():
        numbers[header.dtype] += torch.Size(header.shape).numel()
    ((most, _),) = numbers.most_common(1)
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in numbers}
    others = [name for name, header in source.headers.items() if header.dtype is not most]
    note = f"as the weights are stored in {names[most]}"
    if others:
        kinds = " or ".join(sorted(name for dtype, name in names.items() if dtype is not most))
        note = f"as most weights are stored in {names[most]}; in {kinds}: {listed(others, most=4)}"
    return _Precision(Precision.BF16 if most is torch.bfloat16 else Precision.FP32, note)


def _pieces(source: DiffusersFolder, members: list[Pair], not_finite: list[str]) -> Iterator[Piece]:
    for pair in members:
        parts = {name: source.read(name) for name in pair.theirs}
        not_finite += [name for name, part in parts.items() if not part.isfinite().all()]
        yield Piece(pair, pair.join(list(parts.values())))


def _bytes(source: DiffusersFolder, pair: Pair) -> int:
    headers = [source.headers[name] for name in pair.theirs]
    return sum(torch.Size(h.shape).numel() * h.dtype.itemsize for h in headers)


def _dtypes(source: DiffusersFolder, table: list[Pair]) -> dict[str, torch.dtype]:
    """Type of each tensor of ours.

    Raises:
        ConvertError: tensors that become one are of several types.
    """
    found: dict[str, torch.dtype] = {}
    for pair in table:
        for name in pair.theirs:
            dtype = source.headers[name].dtype
            if found.setdefault(pair.ours, dtype) is not dtype:
                raise ConvertError(
                    f"{source.path} has {name} in {dtype}, and others that are stored with it in"
                    f" {found[pair.ours]}; save the model in one type"
                )
    return found
