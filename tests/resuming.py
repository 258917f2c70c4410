"""A tiny run that is saved after some steps and continues, without the processes of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from dit.config import RunConfig
from dit.lora.checkpoint import DRAWN, AdapterRun
from dit.lora.targets import chosen_adapters
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.train.checkpoint.async_save import Saver
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint
from dit.train.model_and_optimizer import ModelAndOptimizer, build_model_and_optimizer, randomise
from dit.train.step import forward_backward, optimizer_step
from tests.learning import DATA
from tests.packs import random_pack

STEPS = 2
"""Of a run before it is saved."""


def built(config: RunConfig, groups) -> ModelAndOptimizer:
    """A model with random weights; all are trained, or adapters beside them."""
    adapters = chosen_adapters(config.model, config.lora) if config.lora.enabled else None
    return build_model_and_optimizer(
        config, groups, fill=partial(randomise, seed=2), adapters=adapters
    )


def step(model: ModelAndOptimizer, config: RunConfig, number: int) -> None:
    """A step of the run, on a pack of pictures and videos."""
    grids, lengths = ((1, 4, 4), (3, 3, 3), (1, 2, 2), (4, 2, 2)), (5, 2, 3, 4)
    if config.model.whole_samples_by:  # of several cubes of tokens
        grids = ((4, 5, 9), *grids[1:])
    model.at_step(number)
    item = training_problem(
        training_objective(config.objective),
        random_pack(grids, lengths, model=config.model),
        seed=config.rng.seed,
        step=number,
        null={"text": torch.zeros(1, config.model.crossattn_emb_size)},
        options=config.objective,
        route=config.model.token_route,
    )
    losses = forward_backward(model, [item], objective=config.objective)
    update = optimizer_step(model, config=config, number=number, loss=losses.total)
    assert not update.skipped


def saved(folder: Path, model: ModelAndOptimizer, config: RunConfig, *, steps: int = STEPS) -> Path:
    """A checkpoint of a model after so many steps."""
    drawn = AdapterRun(adapters=model.adapters, base=DRAWN).as_json() if model.adapters else None
    saver = Saver(folder, config, adapters=drawn)
    saver.begin(model, progress=TrainProgress(step=steps), data=DATA, best=False)
    done = saver.finish()
    saver.close()
    assert done is not None
    return done.path


def saved_run(folder: Path, config: RunConfig, groups) -> Path:
    """A checkpoint of a run after `STEPS` steps."""
    model = built(config, groups)
    for number in range(1, STEPS + 1):
        step(model, config, number)
    return saved(folder, model, config)


def resumed(place: Path, config: RunConfig, groups) -> ModelAndOptimizer:
    """The run goes on with a configuration."""
    model = built(config, groups)
    load_checkpoint(place, model, config=config)
    return model
