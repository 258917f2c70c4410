"""Pixels and captions <-> latents and text, for data preparation and generation.

dataset_card    The dataset card: what a folder holds, and how to rebuild its encoders.
normalization   Latents of zero mean and unit variance per channel, and back.
pretrained      Models of Diffusers and Transformers, loaded once a process, from a folder or fr
unused_options  Options that were typed and that nothing of this run reads.
text/
vae/
"""
