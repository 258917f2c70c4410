"""Measurements that several benchmarks share.

shapes              networks and packs that the planner, benchmark.py and make gpu share
packing_simulation  sample lengths -> fill of packs, time to choose them, slowest rank over mean
loader              rates of the loader and of plain reads of its shards; memory of its buffer
steps               measured steps -> medians, shares, MFU; the measured peak of the device
kernels             kernels of a profile: the longest, and the time of all by their kind
bounds              highest rates of a device: products, copies, attention kernels, fused kernels
turns               two runs in turns -> their steps and the ratios of these
rank_bytes          bytes that a process sends, holds and reads at a save or load
memory_traffic      bytes that operations read and write, counted without values
padded              the baseline: Diffusers' model in a plain loop, padded or in buckets
"""
