"""PackedBatch -> Problem, and noise -> latents. Pure torch: no network, no ranks, no framework.

1. rng       (seed, step, pack) -> generators         the only source of randomness in a step
2. dropout   batch -> batch with null texts           classifier-free guidance, one draw per sample
3. levels    quantiles -> noise levels                densities of sigma and t, shift of t
4. edm, flow batch, level, noise -> Problem           the two regressions, and how to undo them
5. problem   1 to 4 as the training step calls them
6. samplers  noise, network -> latents                on Diffusers' levels; guidance
   multistep steps that remember the one before       DPM-Solver++ and UniPC
7. unpatch   tokens -> latents [C, F, H, W]
"""

from dit.config import Sampler
from dit.objectives.make import make_objective
from dit.objectives.objective import Objective, Prediction
from dit.objectives.rng import Draw, pack_rng
from dit.objectives.text_dropout import draw_text_dropout, with_null_text, with_texts
from dit.objectives.training_target import draw_problem, training_problem, validation_problem
from dit.sampling.ode_solvers import Guidance, Network, guided, initial_noise, sample
from dit.sampling.unpatchify import unpack_latents

__all__ = [
    "Draw",
    "Guidance",
    "Network",
    "Objective",
    "Prediction",
    "Sampler",
    "draw_problem",
    "draw_text_dropout",
    "guided",
    "initial_noise",
    "make_objective",
    "pack_rng",
    "sample",
    "training_problem",
    "unpack_latents",
    "validation_problem",
    "with_null_text",
    "with_texts",
]
