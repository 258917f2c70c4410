"""Loader states that an earlier version saved, whose pickles name its modules and classes."""

from __future__ import annotations

import itertools
import pickletools
from pathlib import Path

import pytest
import torch

from dit.config_loading import load_config
from dit.data import build_train_loader
from dit.sizing.flops import work_of_packs
from recipes.runs import dit_debug
from tests.older_runs import BEFORE, RECORDED, unpack

# What pickles name, and what Energon compares when it restores a link of the chain.
NAMES = {"dit.data.position": "ReaderPosition", "dit.data.shares": "Left"}
LINKS = {"ShardShare", "MockReader", "MockShare", "Cooking", "OldestFirst", "EvenCost"}
LINKS |= {"Deliveries"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return unpack("data", tmp_path_factory.mktemp("older")) / "data"


def _state(name: str) -> dict:
    return torch.load(BEFORE / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("name", RECORDED["loaders"])
def test_a_loader_goes_on_where_that_of_an_earlier_version_stood(data, name):
    case = RECORDED["loaders"][name]
    paths = [] if "dataset.mock=true" in case["overrides"] else [f"dataset.path={data}"]
    config = load_config(dit_debug(), overrides=[*case["overrides"], *paths])
    loader = build_train_loader(
        config, rank=0, world_size=1, work=work_of_packs(config.model, config.dataset)
    )
    loader.load_state_dict([_state(name)])
    packs = list(itertools.islice(loader, len(case["packs"])))
    loader.close()
    found = [[pack.pack_id, [list(grid) for grid in pack.grids]] for pack in packs]
    assert found == case["packs"]


def test_the_states_name_the_classes_of_that_version():
    """Else they would show nothing about its names."""
    words = {
        word
        for name in RECORDED["loaders"]
        for _, word, _ in pickletools.genops(_state(name)["readers"])
        if isinstance(word, str)
    }
    assert words >= NAMES.keys() | set(NAMES.values()) | LINKS
