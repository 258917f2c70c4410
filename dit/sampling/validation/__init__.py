"""Samples and their quality at each validation of a training run.

requests           what is sampled: prompts of a file, captions of held-out samples
samples            requests -> latents -> files and metrics, at each validation
feature_extractor  pictures and captions -> features, by a network that the user names
fid_clip           features -> FID, KID and CLIP score
"""
