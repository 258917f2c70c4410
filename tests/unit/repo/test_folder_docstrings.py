"""The map of the tree: docstrings, names, sizes, circles, who touches what others keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docstring_form import docstring_faults
from tools.import_graph import circles
from tools.measure_house import functions_of_opening, length, local_names, long_functions
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
}
# Functions of more than 60 lines: steps in a row, and kernels, which cannot be divided.
LONG = {"_sample_pack", "gated_norm_backward", "rotated_heads_backward"}
# dependency -> why its private members are touched in more than one file.
SPREAD: dict[str, str] = {
    "argparse": "two command lines ask which options were typed, and share no folder",
    "diffusers": "what makes the texts of HunyuanVideo and of FLUX.3 is private in their pipelines",
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


def test_docstrings_are_understood_alone(sources: list[Source], repo_root: Path) -> None:
    """Each has three words or more, and a subject of its own: it begins neither with Of, Those, The
    same, Likewise or Without, nor with a participle (a first word in -ed or -ing that is no noun);
    so do the texts below fields. One of a public function with arguments names one of them (a name,
    or a word of it), unless it begins with what may be its result or act: with any word but such as
    What, Where, In or With.
    """
    faults = docstring_faults([*sources, *read(repo_root, ["tools"])])
    wrong = [str(one) for found in faults.values() for one in found]
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


def test_steps_of_an_opening_are_read_at_a_glance(sources: list[Source]) -> None:
    steps = functions_of_opening(sources)
    wrong = [one.name for one in steps if length(one) > 25 or local_names(one) > 8]
    assert len(steps) > 20 and not wrong


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
