"""PackedBatch -> Problem for training, and the path from noise to latents for sampling.

This folder is pure torch: it knows no network, no ranks, no framework.

1. rng                   (seed, step, pack) -> generators, the only source of randomness in a step
2. text_dropout          batch -> batch with null texts, for classifier-free guidance
3. timestep_sampling     quantiles -> noise levels: densities of sigma and t, and the shift of t
4. objective             the protocols TrainingObjective and SamplingPath
   edm, flow_matching    the two objectives, each of which implements both
5. training_target       1 to 4 as the training step and the validation call them
6. diffusers_schedulers  options of an objective <-> scheduler_config.json of Diffusers
7. registry              `objective.name` -> training side, sampling side, scheduler

Sampling follows a SamplingPath:

8. samplers              noise, network -> latents, on the levels of Diffusers; guidance
   multistep             solvers that use the step before: DPM-Solver++ and UniPC
9. unpatchify            tokens -> latents [C, F, H, W]

To add an objective: in dit/config/objective.py a dataclass of its options and a line of
`OBJECTIVES`; here a file with a class that has `levels` and `problem_at`, and the methods of
SamplingPath if it is to generate; a line of `registry.REGISTRY`.
"""

from dit.objectives.objective import Prediction, SamplingPath, TrainingObjective
from dit.objectives.registry import (
    REGISTRY,
    ObjectiveParts,
    register,
    sampling_path,
    training_objective,
)
from dit.objectives.rng import Draw, pack_rng
from dit.objectives.text_dropout import draw_text_dropout, with_null_text, with_texts
from dit.objectives.training_target import draw_problem, training_problem, validation_problem

__all__ = [
    "REGISTRY",
    "Draw",
    "ObjectiveParts",
    "Prediction",
    "SamplingPath",
    "TrainingObjective",
    "draw_problem",
    "draw_text_dropout",
    "pack_rng",
    "register",
    "sampling_path",
    "training_objective",
    "training_problem",
    "validation_problem",
    "with_null_text",
    "with_texts",
]
