"""Programs that the scripts in recipes/ start.

options           options of generate_dit.py
options_file      their YAML file, as arguments of the command line
load_options      options of all programs that generate from a checkpoint
lora_option       adapters of --lora, added to a network
generate_program  the program of generate_dit.py: prompts and a checkpoint -> files
generate_media    prompts -> pictures and videos, from an open checkpoint
stages            generation in one stage, or in two with a latent upsampler between them
decode_latents    saved latents -> pictures and videos
evaluation        options and report of programs that judge what a checkpoint generates
picture_accuracy  whether captions generate their training pictures, and without noise
"""
