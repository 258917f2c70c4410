"""Turns media and captions into shards, offline; imports neither the model nor Megatron.

`python -m data_prep` lists the commands. In the order in which a sample passes through them:

cli/       the command line
packing    a whole run from start to end: plan, measure, encode, publish
sources/   folders, archives and datasets -> media with their captions
media/     files of pictures and videos -> sizes, frames and pixels
planning/  one line for each sample: its size, frames and split, or why it is refused
engine/    blocks of the plan -> encoded samples, on worker processes; codecs are in `dit/codecs`
writing/   encoded samples -> tar shards, ledger, and the metadata of the dataset folder
inspect/   reads a finished dataset folder back and checks every checksum
formats/   reads and writes caches of other tools
refusals   reasons why a sample is refused, and their counts

A sample that cannot be packed is refused with a reason, counted, and listed in `refused.jsonl`. A
dataset folder is complete once it has a folder `.nv-meta`.
"""
