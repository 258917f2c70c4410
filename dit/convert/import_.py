"""Imports a Diffusers folder as a checkpoint that a run can start from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from dit.checkpoint_paths import FileDigest, sync_and_digest, write_manifest
from dit.config import ModelConfig, Precision, RunConfig, TextPadding
from dit.config_loading import save_config
from dit.convert.atomic_folder import new_folder, split_work
from dit.convert.diffusers_checkpoint import CONFIG, DiffusersFolder, in_groups, open_folder
from dit.convert.diffusers_config import Unsaid, tellable_fields
from dit.convert.errors import ConvertError, listed
from dit.convert.load_hf.settings import checked_table, found_model, found_objective
from dit.convert.megatron_checkpoint import write_file, write_index
from dit.distributed.collective_errors import on_first_rank
from dit.models.diffusers.names import Pair
from dit.models.registry import diffusers_form, is_distilled
from dit.progress import Track, no_progress

_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has written."""

    path: Path
    config: RunConfig
    tensors: int  # number of Diffusers' tensors
    objective_note: str  # where the objective in `config` comes from
    precision_note: str  # where its precision comes from
    notices: tuple[str, ...]  # what a user should know who trains it


@dataclass(frozen=True, slots=True)
class _ImportedFile:
    name: str
    results: list[WriteResult]
    sealed: FileDigest
    not_finite: list[str]  # Diffusers' names of tensors with NaN or Inf


def import_weights(
    hf_path: Path,
    target: Path,
    *,
    text_pad_to: int | TextPadding | Unsaid | None = Unsaid.UNSAID,
    objective: Sequence[str] = (),
    projected_text: bool = False,
    track: Track = no_progress,
) -> Imported:
    """Writes the checkpoint `target` with the weights of `hf_path`, each in its own dtype.

    `text_pad_to` is the length to which captions were padded in training, for weights that this
    project did not export; by default that of the family's published weights. `objective` are
    settings such as `objective.name=flow`, or fields of `model` that the folder does not determine.
    `projected_text` leaves the text projection out, for shards that hold its output. `track` counts
    the tensors of this process. Collective: all processes share the files.

    Raises:
        ConvertError: the folder contradicts its config.json, holds another kind of model or numbers
            that are not finite, or `target` exists or cannot be written.
        ConfigError: `objective` is not understood.
    """
    source = open_folder(hf_path)
    stored = stored_precision(source)
    given, objective = _given_fields(source, objective)
    model = found_model(source, precision=stored.precision, text_pad_to=text_pad_to, given=given)
    _check_given(given, model, source)
    left_out: tuple[str, ...] = ()
    if projected_text:
        model, left_out = _without_projection(source, model)
    found = found_objective(source, model, objective)
    table = checked_table(source, model, left_out=left_out)
    config = RunConfig(model=model, objective=found.objective)
    notices: tuple[str, ...] = ()
    if source.is_distilled or is_distilled(config):  # its pipeline takes no guidance
        notices = (source.of_few_steps,)
        config = replace(config, validation=replace(config.validation, guidance=1.0))
    if (said := source.multiplied_out) is not None:
        notices = (*notices, said)
    _write_checkpoint(source, table, target, config, track)
    count = len(source.headers) - len(source.absent) - len(left_out)
    return Imported(target, config, count, found.note, stored.note, notices)


def _given_fields(
    source: DiffusersFolder, words: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Splits the settings `words` of an import into (fields of `model` by name, all other words).

    Raises:
        ConvertError: a field cannot be set, because the folder determines it or no folder needs it.
    """
    of_model = [word for word in words if word.startswith("model.")]
    given = dict(word.removeprefix("model.").split("=", 1) for word in of_model if "=" in word)
    known = tellable_fields(source.config, source.path / CONFIG) if of_model else ()
    if wrong := [word for word in of_model if word[6:].partition("=")[0] not in known]:
        can = " or ".join(f"model.{key}=..." for key in known) or "no key of model"
        raise ConvertError(
            f"{wrong[0]!r} cannot be set: {source.path} decides it, or its network has no such key;"
            f" leave it out. An import of {source.config.get('_class_name')} takes {can}"
        )
    return given, [word for word in words if word not in of_model]


def _check_given(given: Mapping[str, str], model: ModelConfig, source: DiffusersFolder) -> None:
    """Raises ConvertError if the folder determines another value than one `given`."""
    read = diffusers_form(model).keys.told(given)
    for key, value in given.items():
        told = getattr(model, key)
        if told != read[key]:
            raise ConvertError(
                f"model.{key}={value} contradicts {source.path}, where"
                f" {source.pipeline or 'the export'} has {told}; leave model.{key} out"
            )


def _without_projection(
    source: DiffusersFolder, model: ModelConfig
) -> tuple[ModelConfig, tuple[str, ...]]:
    """(network for texts that are projected already, names of the tensors that it leaves out).

    Raises:
        ConvertError: the network has no text projection.
    """
    part = diffusers_form(model).text_projection
    if part is None or not part.is_part(model):
        raise ConvertError(f"--projected-text: {source.path} has no text projection; leave it out")
    return part.removed(model), part.tensors


def _write_checkpoint(
    source: DiffusersFolder, table: list[Pair], target: Path, config: RunConfig, track: Track
) -> None:
    dtypes = _dtypes(source, table)
    sizes = [_bytes(source, pair) for pair in table]
    each = sum(sizes) // dist.get_world_size() + max(sizes)  # so that each process has a file
    groups = in_groups(sizes, most=min(each, _FILE_BYTES))
    mine = sum(len(groups[n]) for n in range(dist.get_rank(), len(groups), dist.get_world_size()))
    with (
        new_folder(target, option="--megatron-path") as folder,
        track("importing tensors", mine, 0) as advance,
    ):

        def write(number: int) -> _ImportedFile:
            members = [table[i] for i in groups[number]]
            return _write(folder / f"__{number}_0.distcp", source, members, advance)

        written: list[_ImportedFile] = split_work(write, len(groups))  # type: ignore[assignment]
        if wrong := [name for file in written for name in file.not_finite]:
            raise ConvertError(
                f"{source.headers[wrong[0]].file} has NaN or Inf in {listed(wrong)}, so that every"
                " output would be NaN; download or export the weights again"
            )

        def finish() -> None:
            write_index(folder, table, dtypes, [r for file in written for r in file.results])
            save_config(config, folder / "config.yaml")
            write_manifest(folder, {file.name: file.sealed for file in written})

        on_first_rank(finish)


def _write(
    file: Path, source: DiffusersFolder, members: list[Pair], advance: Callable[[int], None]
) -> _ImportedFile:
    not_finite: list[str] = []
    results = write_file(file, _pieces(source, members, not_finite, advance))
    return _ImportedFile(file.name, results, sync_and_digest(file), not_finite)


class StoredPrecision(NamedTuple):
    """Precision of a run with a network's stored weights, and why."""

    precision: Precision
    note: str  # why


def stored_precision(source: DiffusersFolder) -> StoredPrecision:
    """bfloat16 if bfloat16 is the dtype of the most numbers in `source`, else float32.

    A bfloat16 folder may have some float32 tensors, such as Diffusers' `learnable_pos_embed`.
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
    return StoredPrecision(Precision.BF16 if most is torch.bfloat16 else Precision.FP32, note)


def _pieces(
    source: DiffusersFolder,
    members: list[Pair],
    not_finite: list[str],
    advance: Callable[[int], None],
) -> Iterator[tuple[Pair, torch.Tensor]]:
    for pair in members:
        parts = {name: source.read(name) for name in pair.theirs}
        not_finite += [name for name, part in parts.items() if not part.isfinite().all()]
        yield pair, pair.join(list(parts.values()))
        advance(1)


def _bytes(source: DiffusersFolder, pair: Pair) -> int:
    headers = [source.headers[name] for name in pair.theirs]
    return sum(torch.Size(h.shape).numel() * h.dtype.itemsize for h in headers)


def _dtypes(source: DiffusersFolder, table: list[Pair]) -> dict[str, torch.dtype]:
    """Dtype of each tensor of the checkpoint to write, by name.

    Raises:
        ConvertError: tensors that are stored as one have different dtypes.
    """
    found: dict[str, torch.dtype] = {}
    for pair in table:
        for name in pair.theirs:
            dtype = source.headers[name].dtype
            if found.setdefault(pair.ours, dtype) is not dtype:
                raise ConvertError(
                    f"{source.path} has {name} in {dtype}, but other tensors of the same matrix in"
                    f" {found[pair.ours]}; save the model in one dtype"
                )
    return found
