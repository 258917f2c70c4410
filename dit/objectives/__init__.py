"""PackedBatch -> Problem for training, and the path from noise to latents for sampling.

This folder is pure torch: it knows no network, no ranks, no framework.

1. objective             the protocols TrainingObjective and SamplingPath
2. timestep_sampling     quantiles -> noise levels: densities of sigma and t, and the shift of t
3. edm, flow_matching    the two objectives, each of which implements both protocols
4. training_target       all random draws of a pack, and its problem, for training and validation;
                         which frames of a sample are given, as its shard says or drawn
5. token_draws           parts of the tokens of each sample: of a token route, of two levels
6. diffusers_schedulers  options of an objective <-> scheduler_config.json of Diffusers
7. registry              `objective.name` -> training side, sampling side, scheduler

To add an objective: in dit/config/objective.py a dataclass of its options and a line of
`OBJECTIVES`; here a file with a class that has `levels`, `problem_at` and `network_level`, and the
other methods of SamplingPath if it is to generate; a line of `registry.REGISTRY`.
"""
