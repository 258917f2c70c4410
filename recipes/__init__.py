"""The scripts that a person starts. Each is also a module: `python -m recipes.NAME --help`.

runs                the runs to start from, one function each; `--recipe NAME` chooses
pretrain_dit        trains
generate_dit        prompts -> pictures and videos, from a checkpoint
decode_latents      latents that were saved -> pictures and videos
evaluate_digits     the part of handwritten digits that a classifier recognises; in a checkout alone
evaluate_pictures   whether captions give the pictures they stood with, and how clean they are
compare_trainings   variants of a configuration trained with several seeds, and judged
fit_run             writes train.yaml beside shards, for the time and the machine at hand
plan_run            memory, traffic and time of a run on other machines
check_layouts       compares the numbers of every parallel layout with one process
rehearsal_encoders  random encoders in a folder, to try packing and training without a download

The YAML files to start from lie in `conf/`.
"""
