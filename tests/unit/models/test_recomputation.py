"""What `model.recompute_granularity=auto` chooses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dit.config import Recompute, RecomputeMethod, RunConfig
from dit.config_loading import load_config
from dit.models.dit.family import DitConfig
from dit.sizing.describe import describe
from dit.sizing.memory import memory
from dit.sizing.recomputation import USABLE, choose_recomputation
from dit.train.opening.machine import with_recomputation
from recipes.runs import dit_debug
from tests.learning import tiny_run

KEYS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
NONE = (Recompute.NONE, RecomputeMethod.UNIFORM, 1)


def _run(**model) -> RunConfig:
    return RunConfig(model=DitConfig(name="dit_xl", recompute_granularity=Recompute.AUTO, **model))


def _chosen(config: RunConfig, size: float | None, world_size: int = 1) -> tuple:
    chosen = choose_recomputation(config, world_size=world_size, device_memory=size)
    return tuple(getattr(chosen.config.model, key) for key in KEYS)


def _need(config: RunConfig, keys: tuple, world_size: int = 1) -> int:
    model = replace(config.model, **dict(zip(KEYS, keys, strict=True)))
    return memory(replace(config, model=model), world_size=world_size).total


@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 4}], ids=["one", "pp4"])
def test_as_few_layers_as_fit(layout):
    config = _run(**layout)
    stages = config.model.pipeline_model_parallel_size
    blocks = [
        (Recompute.FULL, RecomputeMethod.BLOCK, n)
        for n in range(1, config.model.num_layers // stages)
    ]
    for keys in (NONE, *blocks):
        need = _need(config, keys, stages)
        assert _chosen(config, (need + 1) / USABLE, stages) == keys
        assert _chosen(config, (need - 1) / USABLE, stages) != keys or keys == blocks[-1]


def test_a_layer_frees_what_it_keeps_but_its_input():
    """28 layers of 26 rows, some text and modulation; of one computed again the input stays."""
    config = _run()
    one = _need(config, NONE) - _need(config, (Recompute.FULL, RecomputeMethod.BLOCK, 1))
    rows = config.dataset.task_encoder_seq_length * config.model.hidden_size * 2
    assert 26 < one / rows < 27.5
    # Of attention the output is kept anyway, for the linear that follows.
    assert _need(config, (Recompute.SELECTIVE, *NONE[1:])) == _need(config, NONE)


def test_too_small_a_device_computes_all_that_it_can_again_and_is_told():
    chosen = choose_recomputation(_run(), world_size=1, device_memory=2**30)
    assert chosen.config.model.recompute_granularity is Recompute.FULL
    assert "full, block, the first 27 layers of 28; about" in chosen.reason
    assert "which do not fit into 90% of 1.0" in chosen.reason


def test_nothing_is_computed_again_on_a_cpu(groups):
    config, notes = with_recomputation(tiny_run(recompute_granularity=Recompute.AUTO))
    assert config.model.recompute_granularity is Recompute.NONE
    assert notes == ("recomputation auto: none on a CPU",)
    full = tiny_run(recompute_granularity=Recompute.FULL)
    assert with_recomputation(full) == (full, ())


def test_a_dry_run_says_what_each_kind_of_device_would_choose():
    config = _run()
    config = replace(config, dataset=replace(config.dataset, task_encoder_seq_length=32768))
    lines = describe(config, world_size=1).splitlines()
    first = next(i for i, line in enumerate(lines) if "auto: none on a CPU" in line)
    assert "a100, h100: full, block, the first 3 layers of 28; about 66.8 GiB" in lines[first + 1]
    assert "h200: none; about 72.5 GiB, which fit into 90% of 131.3" in lines[first + 2]


def test_the_page_of_ltx_video_has_the_memory_that_a_dry_run_computes(repo_root):
    """The 13B with adapters of rank 128, in the packs of its configuration, on one 80 GB GPU."""
    file, told = repo_root / "conf/ltx_lora.yaml", ["dataset.mock=true"]
    config = load_config(dit_debug(), config_file=file, overrides=told)
    assert (config.model.name, config.lora.rank) == ("ltxv_13b", 128)
    line = next(line for line in describe(config, world_size=1).splitlines() if "a100, h" in line)
    layers, most, need, whole = re.findall(r"(?:first|layers of|about|% of) ([\d.]+)", line)
    page = " ".join((repo_root / "docs/ltx.md").read_text().split())
    tokens = f"{config.dataset.task_encoder_seq_length:,}"
    assert f"the 13B with packs of {tokens} tokens takes {need} GiB" in page
    assert f"of an 80 GB GPU ({whole} GiB), recomputing {layers} of {most} layers" in page
