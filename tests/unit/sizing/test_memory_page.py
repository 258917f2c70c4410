"""The tables of docs/memory.md: what the estimate of `--dry-run` says of each network.

UPDATE_GOLDEN=1 writes the figures anew, and adds a row for what has none.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dit.config import (
    BaseType,
    DatasetConfig,
    EmaConfig,
    EmaKind,
    LoraConfig,
    Precision,
    Recompute,
    RunConfig,
    TrainConfig,
)
from dit.config_loading.cli import parse_arguments
from dit.models.registry import FAMILIES, family_named, named_model, network_spec
from dit.sizing.memory import memory, parameter_count
from dit.sizing.recomputation import USABLE
from recipes.runs import RECIPES

GIB = 2**30
OTHERS = {"dit_digits_lora.yaml", "flux_schnell_lora.yaml"}
"""Files of `conf/` with adapters that have no row: of a tiny network, and of the size of another
row."""


def gib(config: RunConfig) -> float:
    return memory(config, world_size=1).total / GIB


def room(gigabytes: float) -> float:
    """GiB of a card of so many GB that a run may take: what `auto` takes of it."""
    return USABLE * gigabytes * 1e9 / GIB


def swapping(config: RunConfig, most: float) -> str | None:
    """The fewest swapped blocks with which a run takes at most so many GiB, in words."""
    last = network_spec(config.model).layers - 1
    one = gib(config) - gib(replace(config, model=replace(config.model, blocks_to_swap=1)))
    count = max(0, -int(-(gib(config) - most) // one))
    swapped = replace(config.model, blocks_to_swap=min(count, last))
    if gib(replace(config, model=swapped)) > most:
        return None
    return f", swap {count}" if count else ""


def keys_of(config: RunConfig, narrow: RunConfig, gigabytes: float) -> str:
    """What a run needs for a card: 8 bits first, then swapped blocks, then offloaded layers."""
    most = room(gigabytes)
    if gib(config) <= most:
        return "nothing"
    if (more := swapping(narrow, most)) is not None:
        return f"8 bits{more}"
    layers = network_spec(config.model).layers
    offloaded = replace(narrow.model, cpu_offloading_num_layers=layers)
    more = swapping(replace(narrow, model=offloaded), most)
    return "shorter packs" if more is None else f"8 bits{more}, offload {layers}"


def row_of_file(name: str, file: str) -> str:
    """A row of the table of adapters."""
    options = (f"model.name={name}", "model.recompute_granularity=full", "lora.base_dtype=null")
    words = ["--config-file", f"conf/{file}", "--mock", *options]
    config = parse_arguments(words, recipes=RECIPES).config
    narrow = replace(config, lora=replace(config.lora, base_dtype=BaseType.FLOAT8_E4M3))
    needs = " | ".join(keys_of(config, narrow, card) for card in (24, 80))
    weights = 2 * parameter_count(config.model) / GIB
    tokens = f"{config.dataset.task_encoder_seq_length:,}"
    return (
        f"| `{name}` | `{file}` | {tokens} | {gib(config):.1f} | {gib(narrow):.1f} | {needs}"
        f" | {weights:.1f} |\n"
    )


def row_of_long_packs(name: str) -> str:
    """A row of the table of packs of 32,768 tokens: adapters, then all weights."""
    model = replace(named_model(name), recompute_granularity=Recompute.FULL)
    config = RunConfig(
        model=replace(model, precision=Precision.BF16),
        dataset=DatasetConfig(mock=True, task_encoder_seq_length=32_768),
        train=TrainConfig(global_batch_size=1),
        ema=EmaConfig(kind=EmaKind.NONE),
    )
    need = memory(replace(config, lora=LoraConfig(rank=32)), world_size=1)
    adapters = need.weights, need.gradients + need.optimizer, need.activations, need.total
    figures = [f"{n / GIB:.1f}" for n in (*adapters, memory(config, world_size=1).total)]
    return f"| `{name}` | {' | '.join(figures)} |\n"


def hold(page: Path, heading: str, wanted: str) -> None:
    """Compares the rows below a heading of the page with what they should be, or writes them."""
    text = page.read_text()
    before, found, section = text.partition(f"\n## {heading}\n")
    assert found, heading
    rows = re.findall(r"^\| `.+\|\n", section.partition("\n## ")[0], re.MULTILINE)
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(before + found + section.replace("".join(rows), wanted, 1))
    else:
        assert "".join(rows) == wanted


def named(page: Path, heading: str) -> list[tuple[str, ...]]:
    """The names in the rows below a heading: of the network, and of the file if there is one."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [tuple(re.findall(r"`([^`]+)`", row)) for row in re.findall(r"^\| `.+", section, re.M)]


@pytest.mark.slow
def test_adapters_of_each_file_have_these_figures(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    page, heading = repo_root / "docs/memory.md", "Training adapters"
    rows = named(page, heading)
    files = {file.name for file in (repo_root / "conf").glob("*_lora.yaml")} - OTHERS
    new = sorted(files - {file for _, file in rows})
    if os.environ.get("UPDATE_GOLDEN"):
        for file in new:
            words = ["--config-file", f"conf/{file}", "--mock"]
            rows.append((parse_arguments(words, recipes=RECIPES).config.model.name, file))
    hold(page, heading, "".join(row_of_file(name, file) for name, file in rows))
    assert {file for _, file in rows} == files


def test_long_packs_have_these_figures(repo_root: Path) -> None:
    """The figures are those of the networks named there; a family that it lacks gets a row."""
    page, heading = repo_root / "docs/memory.md", "Packs of 32,768 tokens"
    rows = [name for (name,) in named(page, heading)]
    shown = {named_model(name).family for name in rows}
    others = (family_named(one) for one in FAMILIES if one not in shown)
    # Without a counterpart in Diffusers there are no adapters.
    new = [next(iter(one.sizes)) for one in others if one.diffusers is not None]
    hold(page, heading, "".join(map(row_of_long_packs, [*rows, *new])))
