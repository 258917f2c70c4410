"""Processes: how they start, what they send each other, and how they end.

entry                how a script ends: exit code, one message for an error, signals to stop; how a
                     process leaves after an error, whatever it would wait for
cuda_environment     what CUDA reads from the environment before it starts
megatron_import      the import of Megatron-Core, without what it brings and no run needs
process_groups       the start of the processes, the groups of a layout, one for those of the same
                     ranks that nothing uses, running without CUDA
cpu_threads          number of CPU threads, if others use the CPU or a container gets a part of it
pack_broadcast       one rank of a replica reads, all get its packs
model_parallel       one pack over context ranks and pipeline stages
data_parallel        gradients and weights over data ranks; the float32 main parameters
row_shares           which rows of a weight a data rank has, and how it keeps them
full_sharding        the same with weights in shares (`ddp.sharding=weights`), by torch's FSDP2
share_schedule       the ranks of shares; when weights are gathered, and gradients summed
collective_errors    an error on one rank is raised on all
watchdog             no process waits for ever for another one that has died
"""
