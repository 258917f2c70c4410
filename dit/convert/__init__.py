"""Checkpoints to and from Hugging Face Diffusers: `python -m dit.convert import|export|verify`.

cli                   the command line
diffusers_checkpoint  a Diffusers folder: JSON checked key by key, tensors read one at a time
diffusers_config      config.json and scheduler_config.json, from and to a run's configuration
megatron_checkpoint   a checkpoint, read and written one tensor at a time, for any layout
import_               writes a checkpoint from a Diffusers folder
export                writes a Diffusers folder from a checkpoint; also at each save of a run
pipeline              the other components of a pipeline folder
verify                compares every tensor of both, and the outputs of the two networks
lora                  checkpoints of adapters to and from files, alone or merged
cards                 the README.md of an exported folder
atomic_folder         a target folder that appears only when it is complete
load_hf               starts a run from a Diffusers folder, without an import
bridge                registration with NVIDIA's Megatron-Bridge; imported on demand
errors                the error of this folder

Diffusers' names of a network and its tensors come from the family (`Family.diffusers`), which
`_class_name` or `model.family` selects. Only `verify` and `bridge` build a network. All processes
of the group call every function that converts, and share the files. Checkpoints hold whole
tensors, whichever layout wrote them, so no layout appears in this folder.
"""
