"""Attention inside each sample of a pack: what it computes, by which kernel, and who chooses it.

spans     which tokens attend to which, and the plain definition
fit       which kernels a device, a network and the packages that are here allow; without torch
kernels   the calls of each kernel, by its name in `model.attention_backend`, and one call for a
          whole pack, for those that know no padding; torch's SDPA, for neighbours of equal lengths
          in one call: CPUs, float32, long samples
cudnn_graphs  cuDNN's attention of a whole pack in one call, by its frontend
cubes     which tokens are in which cube of a sample
cube_attention  of cubes of tokens to the means of all cubes, and to some of them in full (VSA)
cube_kernel  the second part of it on a GPU
block_causal  of a text to what stands before it, of a picture to all of itself and before it
choice    what a run computes in attention, and which kernel is the fastest at it
"""
