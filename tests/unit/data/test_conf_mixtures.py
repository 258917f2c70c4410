"""The mock mixtures that conf/ ships: nasty, and packed well all the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest

from dit.config_loading import load_config
from dit.data import build_train_loader
from dit.sizing.flops import work_of_packs
from recipes.runs import RECIPES

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.mark.parametrize(
    ("name", "packs"),
    [
        *(("dit_debug", 200), ("dit_xl_image", 40), ("dit_xl_video", 40)),
        *(("wan_debug", 200), ("wan_1.3b_pretrain", 40)),
    ],
)
def test_mixture_is_nasty_and_fills_packs(opened, name, packs):
    config = load_config(
        RECIPES["dit_xl"](),
        config_file=CONF / f"{name}.yaml",
        overrides=["dataset.mock=true", "dataset.packing_buffer_size=64", "dataset.num_workers=0"],
    )
    capacity = config.dataset.task_encoder_seq_length
    mixture = config.dataset.mock_samples
    patch, tall = config.model.patch_spatial, config.model.patch_temporal
    tokens = [g.frames // tall * (g.height // patch) * (g.width // patch) for g in mixture]
    padded = [n for n in tokens if n % config.dataset.sample_multiple]
    assert min(g.text_length for g in mixture) == 1
    assert max(tokens) > capacity / 2
    assert len(padded) > len(tokens) / 2

    # Few channels: they cost time and do not matter to the packing.
    config = replace(config, model=replace(config.model, in_channels=1, crossattn_emb_size=2))
    loader = build_train_loader(
        config, rank=0, world_size=1, work=work_of_packs(config.model, config.dataset)
    )
    read = list(islice(opened(loader), packs))
    assert sum(pack.real_tokens for pack in read) / (packs * capacity) >= 0.985
    assert all(pack.starts[-1] <= capacity for pack in read)
    keys = list(chain(*(pack.keys for pack in read)))
    assert len(keys) == len(set(keys))
