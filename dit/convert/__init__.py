"""Checkpoints to and from Hugging Face Diffusers: `python -m dit.convert import|export|verify`.

    cli                  the command line
    import_              Diffusers folder -> checkpoint
    export               checkpoint -> Diffusers folder; also at each save of a run
    verify               every tensor of both sides, and what the two networks compute
    diffusers_checkpoint a Diffusers folder: read one tensor at a time, and its files planned
    diffusers_config     config.json and scheduler_config.json <-> our configuration
    diffusers_json       what the JSON files of a Diffusers folder may hold
    megatron_checkpoint  our checkpoint: read and written one tensor at a time, for any layout
    pipeline             the other components of a pipeline folder
    atomic_folder        a target folder that appears only when it is complete
    next_commands        what a user can run when a training run has ended
    errors               `ConvertError`
    bridge               registration with NVIDIA's Megatron-Bridge; imported only when asked for

What Diffusers calls a network and its tensors is said by the family (`Family.diffusers`), which
`_class_name` or `model.family` chooses. Only `verify` and `bridge` build a network. Every function
that converts is called by all processes of the group, which share the files. Our checkpoints hold
whole tensors, whatever layout wrote them, so no layout appears here.
"""
