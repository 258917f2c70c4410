"""Processes of a run: how they start, what they send each other, and how they end.

entry                how a script ends: exit code, one message for an error, signals to stop; a
                     process ends after an error without waiting for others
cuda_environment     environment variables that CUDA reads before it starts
megatron_import      the import of Megatron-Core without its warnings and two packages
process_groups       start of the processes, and the groups of a layout; running without CUDA
cpu_threads          number of CPU threads, beside other programs or in a container with a limit
pack_broadcast       one rank of a replica reads packs and sends them to the others
model_parallel       one pack over context ranks and pipeline stages
data_parallel        gradients and weights over data ranks; the float32 main parameters
row_shares           which rows of each weight a data rank has (FSDP), and how they are stored
full_sharding        data parallelism with sharded weights (`ddp.sharding=weights`), by FSDP2
share_schedule       the device mesh of FSDP; when weights are gathered and gradients reduced
collective_errors    an error on one rank is raised on all
watchdog             ends the run if a process has died, so that no other waits for ever
"""
