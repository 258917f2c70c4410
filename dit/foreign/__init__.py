"""Converts other tools' configurations to this project's keys, with a note on each of their keys.

The note says as which key of this project a key is read, or why it is not used. An unsupported
value is an error if another value of the same key is supported. The loader of configurations knows
only this project's keys, and imports these tables only if a file has keys of another tool.

    entry           `Foreign`: how one key and its values are read
    optimizers      names of optimizers, which several tools share
    dfm             NVIDIA's DFM and Megatron-Bridge; keys that they share with this project
    automodel       NeMo AutoModel
    fastvideo       FastVideo
    diffusion_pipe  diffusion-pipe
    translate       `is_theirs`, `translate`, `fitted`, and `advice` about a single key
    __main__        `python -m dit.foreign THEIRS > ours.yaml`
"""
