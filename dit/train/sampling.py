"""Samples at a validation round, of which training notices nothing."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from dit.parallel.groups import device
from dit.parallel.watch import doing
from dit.parallel.whole import Whole
from dit.train.run import Drawn, Run


def draw_samples(run: Run) -> Drawn | None:
    """Calls `run.samples` with the model, its weights the average where there is one.

    Afterwards weights, random numbers and memory of the device are as before. Returns what the
    first rank gets.
    """
    if run.samples is None:
        return None
    doing("sampling")
    learner, where = run.learner, device()
    with ExitStack() as inside:
        # Loading a decoder may draw initial weights that it then overwrites.
        inside.enter_context(torch.random.fork_rng([where] if where.type == "cuda" else []))
        inside.enter_context(learner.settled())
        if learner.ema is not None:
            inside.enter_context(learner.ema.as_weights(learner.chunks))
        model = Whole(learner.chunks).eval()
        drawn = run.samples(run, model)
        model.train()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return drawn
