"""Empties the dataset folder before samples are packed, and publishes it after that.

`.nv-meta` is written last, by one rename, so a folder that has it is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import yaml
from torch import Tensor

from data_prep.planning.splits import Split
from data_prep.refusals import PrepError
from data_prep.writing.readme import README_NAME, SAMPLES_NAME, MadeBy, write_readme
from dit.codecs.dataset_card import CARD_NAME, NULL_TEXT_NAME
from dit.safe_writing import (
    LOCK,
    TEMPORARY,
    FolderInUseError,
    only_writer,
    sync_folder,
    write_atomically,
)

META = ".nv-meta"
REFUSED_NAME = "refused.jsonl"

TRAIN_NAME = "train.yaml"  # a run that fits the dataset
LEDGER = ".ledger"
PLAN_NAME, PAGE_NAME, SUMMARY_NAME = "plan.jsonl", "plan.html", "plan_summary.json"


def _files(*names: str) -> re.Pattern[str]:
    return re.compile(rf"({'|'.join(map(re.escape, names))})(\.spool)?(\.tmp)?")


_PLANNED = (PLAN_NAME, PAGE_NAME, SUMMARY_NAME, REFUSED_NAME)
_PLAN = _files(*_PLANNED)
_OURS = _files(META, LEDGER, CARD_NAME, NULL_TEXT_NAME, README_NAME, TRAIN_NAME, *_PLANNED)
_EDITED = re.compile(r"train_\d+\.yaml")  # by the user, kept from being replaced
# Index files that `--output_format` writes beside the shards.
_INDEX = re.compile(r"metadata(_shard_\d+)?\.json(\.tmp)?")
_SHARDS = r"(shard|rank\d+)-\d+\.tar(\.idx)?"
# Folders and the files that we write into them. Both must match: a user may have pictures in a
# folder 512x512, too.
_FOLDERS = {
    re.compile("|".join(Split)): re.compile(rf"{_SHARDS}(\.tmp)?"),
    re.compile("dfm_shards"): re.compile(rf"{_SHARDS}(\.tmp)?"),
    re.compile(r"\d+x\d+"): re.compile(r"[0-9a-f]{32}\.(meta|pt)(\.tmp)?"),
    re.compile(SAMPLES_NAME): re.compile(r"\d+\.png(\.tmp)?"),
    re.compile("combined_parquet_dataset"): re.compile(r"data_chunk_\d+\.parquet(\.tmp)?"),
}


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates `folder`, and keeps other runs from writing to it while the context is open.

    The folder is removed if it stays empty.

    Raises:
        PrepError: another run writes to it, or it is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"--output_dir {folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with only_writer(folder, named=f"--output_dir {folder}"):
            yield
    except FolderInUseError as error:
        raise PrepError(str(error)) from None
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


def check_source_outside(folder: Path, *, source: Path, option: str) -> None:
    """Checks that --overwrite cannot remove the source.

    Raises:
        PrepError: `source`, the value of `option`, is the output `folder` or lies in it.
    """
    if source.resolve().is_relative_to(folder.resolve()):
        raise PrepError(
            f"{option} {source} is --output_dir {folder} or lies in it, where --overwrite would"
            " remove it; give another output folder"
        )


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Creates `folder`; with `overwrite`, removes the dataset of an earlier run from it.

    Without `overwrite` the dataset stays, and the caller continues it.

    Raises:
        PrepError: the folder has other files, or a dataset that cannot be continued.
    """
    found = check_folder(folder, overwrite=overwrite)
    # `.nv-meta` first, so that the dataset is invalid from now on. Then leftovers of a killed
    # removal, whose names the removal of the others needs.
    for path in sorted(found, key=lambda p: (p.name != META, not p.name.endswith(TEMPORARY))):
        if overwrite:
            remove(path)


def check_folder(folder: Path, *, overwrite: bool) -> list[Path]:
    """Creates `folder`, and returns the files and folders that an earlier run left in it.

    Raises:
        PrepError: the folder has other files, or without `overwrite` a dataset that cannot be
            continued.
    """
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"--output_dir {folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(path for path in folder.iterdir() if path.name != LOCK)
    foreign = [path for path in found if not _is_ours(path)]
    if not overwrite:
        planned_only = all(_PLAN.fullmatch(path.name) for path in found)
        if found and (foreign or not ((folder / LEDGER).is_dir() or planned_only)):
            raise PrepError(
                f"--output_dir {folder} is not empty (it holds {(foreign or found)[0].name}), and"
                " has no packing that could be continued; give another folder"
                f"{'' if foreign else ', or replace the dataset in it with --overwrite'}"
            )
    elif foreign:
        raise PrepError(
            f"--output_dir {folder} holds {foreign[0].name}, which no packing wrote, so"
            " --overwrite removes nothing; give another folder"
        )
    return found


def _is_ours(path: Path) -> bool:
    if any(names.fullmatch(path.name) for names in (_OURS, _EDITED, _INDEX)):
        return True
    name = path.name.removesuffix(TEMPORARY)  # `remove` may have been killed
    inside = next((files for names, files in _FOLDERS.items() if names.fullmatch(name)), None)
    if inside is None or not path.is_dir():
        return False
    return all(inside.fullmatch(file.name) for file in path.iterdir())


def remove(path: Path) -> None:
    """Removes a file or folder; a folder is renamed before its content is removed."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    # Renamed first: a kill must not leave a part of `.nv-meta`.
    doomed = path if path.name.endswith(TEMPORARY) else path.rename(f"{path}{TEMPORARY}")
    shutil.rmtree(doomed)


def publish(
    folder: Path,
    *,
    shards: Mapping[Split, Mapping[str, int]],
    card: Mapping[str, Any],
    null_text: dict[str, Tensor],
    made: MadeBy | None = None,
) -> None:
    """Writes cards, null text and Energon's metadata, once all shards are complete.

    `shards` has the number of samples of each shard, by split and file name. `null_text` is the
    text encoder's output for an empty caption, rows [L, E] and vectors [E] by name; it is empty if
    each sample has its own. If `made` is None, no README is written.
    """
    if null_text:
        write_atomically(folder / NULL_TEXT_NAME, safetensors.torch.save(null_text))
    write_atomically(folder / CARD_NAME, (json.dumps(card, indent=2) + "\n").encode())
    if made is not None:
        write_readme(folder, card, made)
    unfinished = folder / (META + TEMPORARY)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    for name, content in _energon_files(shards).items():
        write_atomically(unfinished / name, content.encode())
    # Last, because a folder with these metadata is a dataset for Energon.
    unfinished.rename(folder / META)
    sync_folder(folder)


def _energon_files(shards: Mapping[Split, Mapping[str, int]]) -> dict[str, str]:
    """The metadata files, by name, that loaders read and `energon prepare` would write.

    They are made without reading the shards.
    """
    import megatron.energon
    from megatron.energon.bracecollapse import collapse

    counts = {f"{split}/{name}": n for split in shards for name, n in shards[split].items()}
    parts = {
        str(split): sorted(f"{split}/{name}" for name in shards.get(split, ())) for split in Split
    }
    patterns = {split: collapse(names, keep_order=True) for split, names in parts.items()}
    info = {
        "energon_version": megatron.energon.__version__,
        "shard_counts": dict(sorted(counts.items())),
    }
    dataset = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    return {
        ".info.json": json.dumps(info, indent=2),
        "split.yaml": yaml.dump({"split_parts": patterns, "exclude": []}, sort_keys=False),
        "dataset.yaml": yaml.dump(dataset, sort_keys=False),
    }
