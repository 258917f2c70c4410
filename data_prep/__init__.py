"""Media and captions -> shards, offline; knows nothing of the model or of Megatron.

`python -m data_prep` lists the commands. The way of a sample, one file each:

1. `images`, `digits`  list media, read one into a `Clip` (`clips`); `captions` finds its text
2. `processors`        clip -> whitened latent, and back
3. `text`              caption -> embedding
4. `shards`            latent, text and description -> tar and index, each appearing whole
5. `folder`            card, null text and Energon's `.nv-meta`, last of all
6. `inspection`        reads a finished folder back and checks every payload

`packing` runs them in that order. What cannot be packed is refused with a reason (`refusals`),
counted, and listed in `refused.jsonl`. A folder that has `.nv-meta` is whole.
"""
