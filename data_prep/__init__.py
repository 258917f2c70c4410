"""Media and captions -> shards, offline; knows nothing of the model or of Megatron.

`python -m data_prep` lists the commands. The way of a sample:

1. `sources`     media and captions, in folders, archives and datasets; `digits` is one of its own
2. `planning`    what becomes of each: size (`sizing`), frames (`frame_rules`), or why it is refused
3. `running`     blocks of the plan on worker processes, with a ledger of what is done
4. `processors`  pixels (`pictures`, `videos`) -> whitened latent, and back; `text` likewise
5. `shards`      latent, text and description -> tar and index, each appearing whole
6. `folder`      card, null text and Energon's `.nv-meta`, last of all
7. `inspection`  reads a finished folder back and checks every payload

`packing` runs them in that order. What cannot be packed is refused with a reason (`refusals`),
counted, and listed in `refused.jsonl`. A folder that has `.nv-meta` is whole.
"""
