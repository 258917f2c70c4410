"""Processes: starting them, their groups, and what they send each other.

entry                how a script ends: exit code, and one message for what went wrong
process_groups       starting the processes, and the groups of a layout
cpu_backend          Megatron-Core on a machine without CUDA
pack_broadcast       one rank of a replica reads, all get its packs
model_parallel       one pack over context ranks and pipeline stages
device_specs         what the data sheets of accelerators promise
collective_errors    one outcome on all ranks
watchdog             no process waits for ever for another that has died
"""
