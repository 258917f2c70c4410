"""Pretraining of diffusion transformers on packed latents, on Megatron-Core."""
