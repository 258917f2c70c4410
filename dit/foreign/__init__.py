"""Conversion of other tools' configurations to our keys, with a note about each of their keys.

The loader of a run, which calls it, knows only our keys. The note of a key says as which of our
keys it is read, or why it is not used. An unsupported value is an error if another value of the key
is supported. The tables are imported only for keys that are not ours.

    entry           `Foreign`: how one key and its values are read
    optimizers      names of optimizers, which several tools share
    dfm             NVIDIA's DFM and Megatron-Bridge; keys that they share with us
    automodel       NeMo AutoModel
    fastvideo       FastVideo
    diffusion_pipe  diffusion-pipe
    translate       `is_theirs`, `translate`, `fitted`, and `advice` about a single key
    __main__        `python -m dit.foreign THEIRS > ours.yaml`
"""
