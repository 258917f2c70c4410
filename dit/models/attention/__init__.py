"""Attention within each sample of a pack: its definition, its kernels, and their choice.

spans           which tokens attend to which, and attention by its definition
fit             the kernels that a device, a network and the installed packages allow; no torch
kernels         the call of each kernel in `model.attention_backend`. SDPA gets one call for each
                group of adjacent samples of equal lengths, other kernels one for the whole pack
cudnn_graphs    attention of a whole pack in one call of cuDNN, by nvidia-cudnn-frontend
cubes           which tokens are in which cube of a sample
cube_attention  Video Sparse Attention: each cube attends to the means of all cubes, and to the
                tokens of a few
cube_kernel     attention of each cube to the tokens of a few cubes, on a GPU
block_causal    causal attention for text; a picture attends to itself and everything before it
choice          the attention calls of a run, and the fastest kernel that works for them
"""
