"""Noise -> latents -> pictures: samplers, and what generation needs around them.

prompts          files of prompts -> `Prompt`
cards            dataset card -> decoder and text encoder; pipeline of Diffusers -> a card
open_checkpoint  checkpoint -> model, text encoder and decoder, on the layout of these processes
given_pictures   files of first and last frames, and of references -> what the network reads
latent_sizes     sizes in pixels -> sizes in latent cells that decoder and model accept
generate         requests -> latents, many requests in one pack
experts          two networks, each of which has its range of noise levels
ode_solvers      noise -> latents: Euler, Heun, DPM-Solver++, UniPC; classifier-free guidance
reference_guidance  guidance away from samples without references, too
guiders          guiders of Diffusers' pipelines in the place of that guidance
media_files      decoded pictures -> PNG and MP4 files, and their list samples.json
grid             decoded pictures -> one overview picture, a row for each prompt
conditions/      pictures and clips that a video shows at frames of its own
commands/        the programs that recipes/ start
validation/      samples and their quality at each validation of a training run
"""
