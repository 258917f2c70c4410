"""Trains a tiny DiT on one process and on other layouts, and compares every number; see --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dit.config import CheckpointConfig, DistConfig, MockGeometry, RunConfig, ValidationConfig
from dit.distributed.entry import run
from dit.layout_check.program import check_layouts
from recipes.runs import dit_debug

# Tokens in patches: 35, 30 (video), 15, 2 and 1, padded to 48, 32, 16, 16 and 16: a pack of the
# last two leaves a context rank with nothing but padding.
MIXTURE = (
    MockGeometry(height=10, width=14, text_length=9, weight=1.0),
    MockGeometry(frames=5, height=4, width=6, text_length=5, fps=12.0, weight=1.0),
    MockGeometry(height=6, width=10, text_length=1, weight=1.0),
    MockGeometry(height=2, width=4, text_length=3, weight=3.0),
    MockGeometry(height=2, width=2, text_length=1, weight=3.0),
)


def layout_check() -> RunConfig:
    """A tiny run to compare: 0.8 M parameters, packs of 96 tokens, EMA, learning rate 1e-4."""
    base = dit_debug()
    dataset = replace(
        base.dataset, mock_samples=MIXTURE, task_encoder_seq_length=96, packing_buffer_size=40
    )
    return replace(
        base,
        model=replace(base.model, num_layers=4),
        dataset=dataset,
        train=replace(base.train, global_batch_size=4, train_iters=1000),
        # With this seed the first packs have given frames, for networks that take them, and leave a
        # context rank without a real token.
        rng=replace(base.rng, seed=10),
        validation=ValidationConfig(quantiles=2),
        checkpoint=CheckpointConfig(save=None),
        # The check looks for hangs, so it gives up sooner than a long run.
        dist=DistConfig(distributed_timeout_minutes=5),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the layouts that the command line `argv` asks for.

    Returns exit code 0 if every layout agrees, else 1.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    return check_layouts(tokens, base=layout_check(), script=Path(__file__).resolve())


if __name__ == "__main__":
    sys.exit(run(main))
