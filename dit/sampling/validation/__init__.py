"""Samples and their quality at each validation of a training run.

requests           what is sampled: `ValidationRequest`s, and those of held-out samples' captions
prompt_requests    those of the prompts of a file, with the pictures that are given
samples            what a start refuses; requests -> latents -> files and metrics
feature_extractor  pictures and captions -> features -> FID, KID and CLIP score
"""
