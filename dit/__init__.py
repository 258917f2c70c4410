"""Pretraining of diffusion transformers on packed latents, on Megatron-Core.

The folders in the order in which a sample passes them:

batch         the types that pass between folders
bin_packing   chooses the samples of a pack, and the next pack
pack_wire     a pack as one row of bytes, for other processes and devices
config        one tree of options, with every check
config_loading  reads recipe, YAML file and command line into this tree
foreign       converts configurations of other tools
codecs        VAEs and text encoders: pixels and captions to latents and text, and back
data          reads shards and makes packs
objectives    turns a pack into a regression problem
models        networks: from noisy tokens to predictions
lora          low-rank adapters of frozen linears, and their files
distributed   process groups, sending packs, running without CUDA
distcp        Megatron-Core's sharded checkpoint, written in three steps
checkpoint_paths  the checkpoint that a path means, and checks that its files are unchanged
train         the step, the loop, checkpoints, metrics
sampling      from noise to latents to pictures
convert       checkpoints to and from Hugging Face Diffusers
report        one HTML page about runs
playground    a page to try prompts on
fitting       train.yaml beside shards: a run for the data, the time and the machine
sizing        parameters, memory and operations of a network, from its form on `meta`
planner       memory, communication and time of a run on other machines
layout_check  checks that every parallel layout computes the same numbers

All folders may use: bin_packing, command_line, console, device_specs, launched, local_path,
parsing, progress, safe_pickle, safe_writing, stored_samples, streams, system_errors, token_ids,
watching.
"""

import os

from dit.distributed.cpu_threads import CGROUP, choose_threads, usable_cores

choose_threads(os.environ, CGROUP, cores=usable_cores())
