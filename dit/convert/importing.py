"""Diffusers folder -> a checkpoint that a run can start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from dit.config import Precision, RunConfig
from dit.configuring import save_config
from dit.convert.diffusers_folder import CONFIG, DiffusersFolder, in_groups, open_folder
from dit.convert.errors import ConvertError
from dit.convert.folder import new_folder, share
from dit.convert.settings import COSMOS_TEXT_TOKENS, model_config, objective_config
from dit.convert.stored import Piece, write_file, write_index
from dit.convert.table import Pair, pairs
from dit.train.manifest import Sealed, seal, write_manifest
from dit.train.ranks import on_first_rank

_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that holds the weights of a Diffusers folder."""

    path: Path
    config: RunConfig
    tensors: int  # of Diffusers
    objective_note: str  # where the objective in `config` comes from


@dataclass(frozen=True, slots=True)
class _Written:
    file: str
    results: list[WriteResult]
    sealed: Sealed


def import_weights(
    hf_path: Path, target: Path, *, text_pad_to: int | None = COSMOS_TEXT_TOKENS
) -> Imported:
    """Writes the checkpoint `target`, each tensor in the type that it has in `hf_path`.

    `text_pad_to` is what weights were trained with that somebody else exported. All processes call
    it and share the files.

    Raises:
        ConvertError: the folder is not what its config.json says or holds another kind of model,
            or `target` exists or cannot be written.
    """
    source = open_folder(hf_path)
    config, note = _config(source, text_pad_to)
    table = pairs(config.model)
    source.check(table)
    dtypes = _dtypes(source, table)
    sizes = [_bytes(source, pair) for pair in table]
    each = sum(sizes) // dist.get_world_size() + max(sizes)  # something for each process
    groups = in_groups(sizes, most=min(each, _FILE_BYTES))
    with new_folder(target, option="--megatron-path") as folder:

        def write(number: int) -> _Written:
            file = folder / f"__{number}_0.distcp"
            results = write_file(file, _pieces(source, [table[i] for i in groups[number]]))
            return _Written(file.name, results, seal(file))

        written: list[_Written] = share(write, len(groups))  # type: ignore[assignment]

        def finish() -> None:
            write_index(folder, table, dtypes, [r for w in written for r in w.results])
            save_config(config, folder / "config.yaml")
            write_manifest(folder, {w.file: w.sealed for w in written})

        on_first_rank(finish)
    return Imported(target, config, len(source.headers), note)


def _config(source: DiffusersFolder, text_pad_to: int | None) -> tuple[RunConfig, str]:
    whole = any(header.dtype is not torch.bfloat16 for header in source.headers.values())
    model = model_config(
        source.config,
        precision=Precision.FP32 if whole else Precision.BF16,
        text_pad_to=text_pad_to,
        place=source.path / CONFIG,
    )
    found = objective_config(source.scheduler)
    return RunConfig(model=model, objective=found.objective), found.note


def _pieces(source: DiffusersFolder, members: list[Pair]) -> Iterator[Piece]:
    for pair in members:
        yield Piece(pair, pair.join([source.read(name) for name in pair.theirs]))


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
