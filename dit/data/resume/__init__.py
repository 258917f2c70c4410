"""Where the loaders stand, as a checkpoint keeps it, and how other ranks go on from there.

fingerprint   What a saved loader state belongs to. Energon itself restores most mismatches sile
loader_state  Where the readers of a run stand: what a checkpoint keeps of each rank's loader.
reshard       A saved position on another number of ranks or workers.
"""
