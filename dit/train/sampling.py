"""Samples at a validation round, of which training notices nothing."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from dit.distributed.full_forward import FullForward
from dit.distributed.process_groups import device
from dit.distributed.watchdog.monitor import heartbeat
from dit.train.train_state import DrawnSamples, TrainState


def draw_samples(run: TrainState) -> DrawnSamples | None:
    """Calls `run.samples` with the model, its weights the average where there is one.

    Afterwards weights, random numbers and memory of the device are as before. Returns what the
    first rank gets.
    """
    if run.samples is None:
        return None
    heartbeat("sampling")
    learner, where = run.learner, device()
    with ExitStack() as inside:
        # Loading a decoder may draw initial weights that it then overwrites.
        inside.enter_context(torch.random.fork_rng([where] if where.type == "cuda" else []))
        inside.enter_context(learner.settled())
        if learner.ema is not None:
            inside.enter_context(learner.ema.as_weights(learner.chunks))
        model = FullForward(learner.chunks).eval()
        drawn = run.samples(run, model)
        model.train()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return drawn
