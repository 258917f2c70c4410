"""Guidance that leads away from a second network, which sees no captions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dit.config import Problems
from dit.convert.import_ import import_weights
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.experts import GuidedPair
from dit.sampling.open_checkpoint import open_checkpoint
from tests.families import case, ideogram4
from tests.families.generation import noise_of, opened, ours

AWAY = "unconditional_transformer"


def test_a_pair_of_networks(groups, tmp_path: Path) -> None:
    """Offload changes nothing; without text the first one is guided by itself; refusals."""
    ideogram4.pipeline(tmp_path)
    run, start = opened(tmp_path, away=AWAY), noise_of((1, 5, 7), 16)
    assert isinstance(run.model, GuidedPair)
    told = {"guidance": 4.0, "negative_prompt": ""}
    pair = ours(run, start, **told)
    moves: list[str] = []
    hosted = replace(run, model=GuidedPair(run.model.first, run.model.second, offload=True))
    with patch.object(type(run.model.first), "to", lambda _, where: moves.append(str(where))):
        assert torch.equal(ours(hosted, start, **told), pair)
    assert moves == ["cpu"] * 4 * case.STEPS  # in each of two calls a step, one away, one here
    alone = ours(replace(run, model=run.model.first), start, **told)
    assert case.gap(alone, pair) > 1e-2
    with pytest.raises(ValueError, match=r"negative prompt 'blurry': .* sees no text"):
        ours(run, start, guidance=4.0, negative_prompt="blurry")

    encoders = LoadOptions(t5_cache_dir=str(tmp_path / "pipeline"))
    both = replace(encoders, checkpoint_path_away="a", checkpoint_path_low="b")
    ideogram4.random_ideogram4(in_channels=8).save_pretrained(tmp_path / "narrow")
    narrow = import_weights(tmp_path / "narrow", tmp_path / "other").path
    with pytest.raises(ValueError, match="cannot be used together; leave one of them out"):
        open_checkpoint(run.path, weights="model", options=both)
    with pytest.raises(Problems, match="--checkpoint_path_away read different latents or inputs"):
        options = replace(encoders, checkpoint_path_away=str(narrow))
        open_checkpoint(run.path, weights="model", options=options)
