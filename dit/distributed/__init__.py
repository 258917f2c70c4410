"""Processes: starting them, their groups, and Megatron-Core on machines without CUDA."""
