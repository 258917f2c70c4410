"""Attention inside each sample of a pack: its definition, its kernels, and their choice.

spans     which tokens attend to which, and the plain definition
fit       the kernels that a device, a network and the installed packages allow; without torch
kernels   the calls of each kernel, by its name in `model.attention_backend`: one call for a whole
          pack with kernels that cannot skip padding; with torch's SDPA (CPUs, float32, long
          samples), one for adjacent samples of equal lengths
cudnn_graphs  cuDNN's attention of a whole pack in one call, by its frontend
cubes     which tokens are in which cube of a sample
cube_attention  attention of cubes to the means of all cubes, and to some in full (VSA)
cube_kernel  attention of cubes to some in full, on a GPU
block_causal  attention of texts to everything before, of pictures to themselves and before
choice    the attention that a run computes, and the fastest kernel for it
"""
