"""PackedBatch -> Problem for training, and the path from noise to latents for sampling.

This folder is pure torch: it knows no network, no ranks, no framework.

1. objective             the protocols TrainingObjective and SamplingPath
2. timestep_sampling     quantiles -> noise levels: densities of sigma and t, and the shift of t
3. edm, flow_matching    the two objectives, each of which implements both protocols
4. training_target       all random draws of a pack, and its problem, for training and validation
5. diffusers_schedulers  options of an objective <-> scheduler_config.json of Diffusers
6. registry              `objective.name` -> training side, sampling side, scheduler

To add an objective: in dit/config/objective.py a dataclass of its options and a line of
`OBJECTIVES`; here a file with a class that has `levels`, `problem_at` and `network_level`, and the
other methods of SamplingPath if it is to generate; a line of `registry.REGISTRY`.
"""

from dit.objectives.objective import Prediction, SamplingPath, TrainingObjective
from dit.objectives.registry import (
    REGISTRY,
    ObjectiveParts,
    register,
    sampling_path,
    training_objective,
)
from dit.objectives.training_target import (
    Draw,
    clean_network_level,
    draw_problem,
    draw_text_dropout,
    pack_rng,
    training_problem,
    validation_problem,
    with_clean_level,
    with_given_tokens,
    with_null_inputs,
)

__all__ = [
    "REGISTRY",
    "Draw",
    "ObjectiveParts",
    "Prediction",
    "SamplingPath",
    "TrainingObjective",
    "clean_network_level",
    "draw_problem",
    "draw_text_dropout",
    "pack_rng",
    "register",
    "sampling_path",
    "training_objective",
    "training_problem",
    "validation_problem",
    "with_clean_level",
    "with_given_tokens",
    "with_null_inputs",
]
