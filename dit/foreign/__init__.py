"""Configurations of other tools -> ours: one function, their file -> our keys and notes.

It stands above the loader of a run, which knows our keys alone. Each key of their file is noted
with our keys that it is read as, or with the reason why it is not used. A value that asks for
something unsupported is an error where another value of the key would be supported. The tables are
imported only for keys that are not ours.

    entry           `Foreign`: how one key and its values are read
    optimizers      names of optimizers, which several of the tools have
    dfm             NVIDIA's DFM and Megatron-Bridge; which of our keys they have as well
    automodel       NeMo AutoModel
    fastvideo       FastVideo
    diffusion_pipe  diffusion-pipe
    translate       `is_theirs`, `translate`, `fitted`, and `advice` about one of their keys
    __main__        `python -m dit.foreign THEIRS > ours.yaml`
"""
