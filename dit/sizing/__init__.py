"""The size of a run: parameters, FLOPs and memory, from the network on torch's meta device.

cuda_kernels    operations that are one kernel on CUDA, for meta tensors
meta_network    one pipeline stage of a network, and packs for it, on the meta device
inventory       weights and linears of the network before, in and after its layers
count_work      multiplications of its linears and attentions, by the lengths of samples
flops           FLOPs of a pass, for the log, the planner, and the loader's balance of packs
kept            bytes that a layer saves for backward, traced on the meta device
activations     bytes that all layers of a device save for backward, over the packs in flight
memory          parameters of a run, trained parameters, and the memory of one device
recomputation   which layers a device recomputes in backward, so that activations fit
pack_traffic    bytes that data-parallel ranks send each other with FSDP
passes          number of packs in a pass through the data, for `train.epochs`
describe        what `--dry-run` prints

Only cuda_kernels, meta_network, count_work and kept import torch and Megatron-Core.
"""
