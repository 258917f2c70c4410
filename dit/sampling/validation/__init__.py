"""Generates samples at each validation of a training run, and measures their quality.

requests           the samples to generate: `ValidationRequest`s for captions of held-out samples
prompt_requests    requests for the prompts of a file, with the pictures beside them
samples            checks at the start; requests -> latents -> files and metrics
feature_extractor  pictures and captions -> features -> FID, KID and CLIP score
"""
