"""Samples and their quality at each validation of a training run.

requests           what is sampled: `ValidationRequest`s, and those of held-out samples' captions
prompt_requests    those of the prompts of a file, with the pictures that are given
check              what a start refuses of all that, for a dry run
samples            requests -> latents -> files and metrics, at each validation
feature_extractor  pictures and captions -> features, by a network that the user names
fid_clip           features -> FID, KID and CLIP score
"""
