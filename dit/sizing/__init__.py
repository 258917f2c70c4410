"""The size of a run: parameters, operations and memory, from the network on torch's meta device.

cuda_kernels    operations that a GPU has a kernel for, of tensors without values
meta_network    one stage of a network, and packs for it, of tensors without values
inventory       its weights and linears: before, in and after the layers
count_work      multiplications of its linears and attentions, by the lengths of samples
flops           operations of a pass, for the log, the planner, and the loader to weigh packs by
kept            what a layer keeps for the backward pass, traced in passes
activations     what the passes of a run keep on one device
memory          parameters of a run, those that it trains, and the memory of one device
recomputation   which layers a device computes again, for what it keeps to fit
pack_traffic    what data ranks with weights in shares send each other
passes          how many packs a pass through the data makes: `train.epochs`
describe        what `--dry-run` prints

The import of a file here brings neither torch nor Megatron-Core, but for the first two,
`count_work` and `kept`.
"""
