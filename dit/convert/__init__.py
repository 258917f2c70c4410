"""Checkpoints to and from Hugging Face Diffusers: `python -m dit.convert import|export|verify`.

    table      which tensor of Diffusers is which of ours: one table for both directions
    settings   config.json and scheduler_config.json <-> our configuration
    diffusers_folder  a folder as Diffusers writes it: read one tensor at a time, files planned
    stored     a checkpoint of ours: read and written one tensor at a time, whatever the layout
    importing  Diffusers folder -> checkpoint
    exporting  checkpoint -> Diffusers folder; also at each save of a run
    pipeline   the other components of a pipeline folder
    verifying  every tensor of both, and what the two networks compute
    folder     a target folder that is there when it is whole, and not before
    cli        the command line
    bridge     registration with NVIDIA's Megatron-Bridge; imported only when asked for

Nothing here builds a network but `verifying` and `bridge`. Every function that converts is called
by all processes of the group, which share the files. A checkpoint of ours holds whole tensors,
whichever layout wrote it, so no layout appears here.
"""
