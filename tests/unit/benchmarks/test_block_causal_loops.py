"""The comparison of packed steps with plain loops over Diffusers' Qwen-Image-2.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare_block_causal
from benchmarks.compare_block_causal import ALONE, OURS, PADDED, check_losses

TINY = ["model.hidden_size=32", "model.num_attention_heads=2", "model.crossattn_emb_size=16"]
TINY += ["model.rope_axes=[4,6,6]", "model.mlp_ratio=1.0"]


def test_the_first_loss_is_that_of_single_samples_and_not_of_padded_ones(
    groups, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "numbers.json"
    words = ["--steps", "0", "--batches", "2", "--side", "4", "--json", str(file)]
    assert compare_block_causal.main([*words, *TINY]) == 0
    losses = json.loads(file.read_text())["losses"]
    assert abs(losses[OURS] - losses[ALONE]) < 1e-5 * losses[ALONE]
    assert abs(losses[PADDED] - losses[ALONE]) > 1e-5 * losses[ALONE]
    assert PADDED in capsys.readouterr().out


def test_other_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="do not compute the same"):
        check_losses({OURS: 1.1, ALONE: 1.0, PADDED: 2.0})
    with pytest.raises(ValueError, match="captions of several lengths"):
        check_losses({OURS: 1.0, ALONE: 1.0, PADDED: 1.0})
