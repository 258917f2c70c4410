"""Samples read from tar shards at their offsets.

file_cache    Shards on a local disk, held open and read at offsets.
reader        Samples of a shard by their place: their heads now, all of them when they are chos
whole_reader  Energon's reader of whole samples, for what is not plain, without its trust in tar
"""
