"""Converts other tools' configurations to this project's keys, with a note on each of theirs.

The loader of a run, which calls it, knows only this project's keys. The note of a key says as which
key it is read, or why it is not used. An unsupported value is an error if another value of the key
is supported. The tables are imported only if a file has keys of another tool.

    entry           `Foreign`: how one key and its values are read
    optimizers      names of optimizers, which several tools share
    dfm             NVIDIA's DFM and Megatron-Bridge; keys that they share with this project
    automodel       NeMo AutoModel
    fastvideo       FastVideo
    diffusion_pipe  diffusion-pipe
    translate       `is_theirs`, `translate`, `fitted`, and `advice` about a single key
    __main__        `python -m dit.foreign THEIRS > ours.yaml`
"""
