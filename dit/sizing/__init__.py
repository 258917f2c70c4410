"""The size of a run: parameters, operations and memory, from the network on torch's meta device.

meta_network    one stage of a network, and packs for it, with tensors without values
inventory       its weights and linears before, in and after the layers
count_work      multiplications of its linears and attentions, by the lengths of samples
flops           operations of a pass, for the log, the planner, and the loader to weigh packs by
memory          parameters of a run, trained parameters, and the memory of one device
recomputation   the layers that a device recomputes to save memory
pack_traffic    traffic of data ranks with weights in shares
passes          number of packs in a pass over the data: `train.epochs`
describe        the output of `--dry-run`

Only meta_network and count_work import torch or Megatron-Core when they are imported.
"""
