"""Pretraining of diffusion transformers on packed latents, on Megatron-Core.

The folders in the order in which a sample passes them:

batch         the types that cross folder borders
bin_packing   which samples share a pack, and which pack is next
pack_wire     a pack as one row of bytes, for other processes and devices
config        one tree of options, with every check
config_loading  recipe, YAML file and command line -> the tree
foreign       configurations of other tools -> ours
codecs        VAEs and text encoders: pixels and captions <-> latents and text
data          shards -> packs
objectives    pack -> regression problem
models        noisy tokens -> prediction
lora          low-rank adapters beside frozen linears, and their files
distributed   process groups, sending packs, running without CUDA
distcp        Megatron-Core's sharded checkpoint in three parts
checkpoint_paths  which checkpoint a path means, and whether its files are as they were saved
train         the step, the loop, checkpoints, metrics
sampling      noise -> latents -> pictures
convert       checkpoints to and from Hugging Face Diffusers
report        one HTML page about runs
playground    a page to try prompts on
fitting       train.yaml beside shards: a run for the data, the time and the machine at hand
sizing        a network on the meta device says its parameters and linears
planner       memory, communication and time of a run on other machines
layout_check  the same numbers on every layout?

What all folders may use: bin_packing, command_line, console, device_specs, launched, local_path,
parsing, progress, safe_pickle, safe_writing, stored_samples, streams, system_errors, token_ids,
watching.
"""

import os

from dit.distributed.cpu_threads import CGROUP, choose_threads, usable_cores

choose_threads(os.environ, CGROUP, cores=usable_cores())
