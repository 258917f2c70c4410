"""The map of the tree: pages of folders, names, sizes, circles, who touches what others keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_graph import circles
from tools.measure_house import long_functions
from tools.source_tree import (
    Source,
    classes,
    family_leaks,
    files_per_folder,
    private_members,
    read,
    twice,
    unlisted,
)

FILES = 12  # of a folder, beside __init__.py and __main__.py
# folder -> why it has more.
FULL: dict[str, str] = {
    "dit": "one file for each thing that all folders may use",
    "dit/models/stacks": "one file for each kind of layer, and for each kind of network",
}
# Functions of more than 60 lines: steps in a row, and kernels, which cannot be divided.
LONG = {"_prepare", "_sample_pack", "gated_norm_backward", "rotated_heads_backward"}
# dependency -> why its private members are touched in more than one file.
SPREAD: dict[str, str] = {
    "argparse": "two command lines ask which options were typed, and share no folder",
    "megatron.core": "patches for CPUs, data parallelism and checkpoint writing are three matters",
    "torch": "the loader's workers, checkpoint writing and hooks of gradients are three matters",
}


@pytest.fixture(scope="module")
def sources(repo_root: Path) -> list[Source]:
    return read(repo_root)


def test_docstring_of_a_folder_lists_its_files(sources: list[Source], repo_root: Path) -> None:
    wrong = [
        f"{folder}/__init__.py lists no {', '.join(names)}"
        for folder, names in unlisted([*sources, *read(repo_root, ["tools"])]).items()
    ]
    assert not wrong, "\n".join(wrong)


def test_class_names_are_unique(sources: list[Source]) -> None:
    wrong = [f"{name}: {', '.join(places)}" for name, places in twice(classes(sources)).items()]
    assert not wrong, "\n".join(wrong)


def test_folders_are_small(sources: list[Source]) -> None:
    full = {folder: count for folder, count in files_per_folder(sources).items() if count > FILES}
    wrong = [f"{folder} has {full[folder]} files" for folder in sorted(full.keys() - FULL.keys())]
    assert not wrong, f"divide, or say in FULL why not: {'; '.join(wrong)}"
    assert full.keys() >= FULL.keys(), f"FULL names a folder of {FILES} files or fewer"


def test_functions_are_short(sources: list[Source]) -> None:
    found = {line.split()[1]: line for line in long_functions(sources)}
    assert found.keys() == LONG, [found[name] for name in found.keys() - LONG]


def test_no_files_lead_to_each_other(sources: list[Source]) -> None:
    """By their imports, late ones and those for types included."""
    assert not circles(sources)


def test_private_members_of_a_dependency_are_touched_in_one_file(sources: list[Source]) -> None:
    found = private_members(sources)
    unknown = found.pop("?", {})
    assert not unknown, f"add them to PRIVATE in tools/source_tree.py, under their owner: {unknown}"
    wide = {dependency: files for dependency, files in found.items() if len(files) > 1}
    wrong = [f"{name}: {wide[name]}" for name in sorted(wide.keys() - SPREAD.keys())]
    assert not wrong, "\n".join(wrong)
    assert wide.keys() >= SPREAD.keys(), "SPREAD names a dependency that one file touches"


@pytest.mark.slow
def test_families_are_known_in_their_folders_alone(sources: list[Source]) -> None:
    assert not (leaks := family_leaks(sources)), "\n".join(leaks)
