"""The programs that recipes/ start.

options                command line and YAML file of generate_dit.py
lora_option            adapters of --lora, beside the weights of a network
generate_media         prompts -> pictures and videos, from a checkpoint
decode_latents         latents that were saved -> pictures and videos
digit_accuracy         the part of generated handwritten digits that a classifier recognises
moving_digit_accuracy  the same of clips: digit and direction
picture_accuracy       whether captions give the pictures they stood with, and clean ones
edited_digit_accuracy  the part of given digits that are edited as told
"""
