"""Media and captions -> shards, offline; knows nothing of the model or of Megatron.

`python -m data_prep` lists the commands. In the order in which a sample passes them:

cli/       the command line
packing    one packing: plan, measure, encode, publish
sources/   folders, archives and datasets -> media with their captions
media/     files of pictures and videos -> sizes, frames and pixels
planning/  one line for each sample: its size, frames and split, or why it is refused
engine/    blocks of the plan -> encoded samples, on worker processes; codecs are in `dit/codecs`
writing/   encoded samples -> tar shards, ledger, and the metadata of the dataset folder
inspect/   reads a finished dataset folder back and checks every checksum
formats/   caches of other tools, read and written
refusals   why a sample is refused, and how many were

A sample that cannot be packed is refused with a reason, counted, and listed in `refused.jsonl`. A
folder that has `.nv-meta` is complete.
"""
