"""Objectives: the regression problem of a pack in training, and the sampling path.

This folder is pure torch: it knows no network, no ranks, no framework.

1. objective             the protocols TrainingObjective and SamplingPath
2. timestep_sampling     quantiles -> noise levels: densities of sigma and t, and the shift of t
3. edm, flow_matching    the two objectives, each of which implements both protocols
4. noise                 noise of the tokens of a pack, and latents of their distributions
5. token_draws           draws of tokens of each sample: for a token route, for two noise levels
6. pack_draws            random draws for a pack in training: the list `TRAINING_DRAWS`
7. training_target       the problem of a pack, for training and validation
8. trajectory            noisy packs that move from noise to latents, for distillation
9. diffusers_schedulers  options of an objective <-> scheduler_config.json of Diffusers
10. registry              `objective.name` -> training side, sampling side, scheduler

To add an objective: in dit/config/objective.py a dataclass of its options and a line of
`OBJECTIVES`; in this folder a file with a class that has `levels`, `problem_at` and
`network_level`, and the other methods of SamplingPath if it is to generate; a line of
`registry.REGISTRY`.
"""
