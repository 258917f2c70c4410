"""Generates pictures from noise: samplers, and the inputs and outputs of generation.

prompts          files of prompts -> `Prompt`
cards            dataset card -> decoder and text encoder; pipeline of Diffusers -> a card
open_checkpoint  checkpoint -> model, text encoder and decoder, on the layout of these processes
given_pictures   files of first and last frames, and of references -> inputs of the network
latent_sizes     sizes in pixels -> sizes in latent cells that decoder and model accept
generate         requests -> latents, many requests in one pack
experts          two networks, each for a range of noise levels
ode_solvers      noise -> latents: Euler, Heun, DPM-Solver++, UniPC; classifier-free guidance
reference_guidance  guidance away from samples without references
guiders          guiders of Diffusers' pipelines, which replace classifier-free guidance
media_files      decoded pictures -> PNG and MP4 files, and their list samples.json
grid             decoded pictures -> one overview picture, a row for each prompt
conditions/      pictures and clips shown at given frames of a video
commands/        the programs that recipes/ start
validation/      samples at each validation of a training run, and their quality
"""
