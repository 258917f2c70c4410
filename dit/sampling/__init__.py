"""Noise -> latents -> pictures: solvers of the sampling ODE, and what generation needs around them.

generate         Prompts -> latents, many at once through packing.
grid             All pictures at a glance: a row for each prompt, which stands beside it.
grid_labels      Captions -> labels of a picture: plain text, in fonts that have its characters.
latent_sizes     Sizes in pixels -> sizes in latent cells, rounded up to what the decoder and th
media_files      Files of generated pictures: PNG or MP4 for each, samples.json, a grid of all (
multistep        Multistep solvers: second order with one network call a step.
ode_solvers      Deterministic samplers: solvers of the ODE along a `SamplingPath`, from noise t
open_checkpoint  A checkpoint -> a model that samples, with the encoders of its data.
options          What `generate_dit.py` can be asked for.
options_file     A YAML file of `generate_dit.py`: options by name, which the command line is st
prompts          Files of prompts: one on each line, or JSON, or a JSON entry on each line.
unpatchify       Tokens of a pack -> latents (the inverse of patchify).
validation/
"""
