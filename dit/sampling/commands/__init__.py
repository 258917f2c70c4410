"""The programs that recipes/ start.

options           command line and YAML file of generate_dit.py
load_options      options of all that open a checkpoint to generate
lora_option       adapters of --lora, beside the weights of a network
generate_program  of generate_dit.py: prompts and a checkpoint -> files
generate_media    prompts -> pictures and videos, from an open checkpoint
decode_latents    latents that were saved -> pictures and videos
evaluation        options and report of programs that judge what a checkpoint generates
picture_accuracy  whether captions give the pictures they stood with, and clean ones
"""
