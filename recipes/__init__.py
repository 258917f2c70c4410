"""Scripts that a user starts. Each is also a module: `python -m recipes.NAME --help`.

pretrain_dit        trains
generate_dit        prompts -> pictures and videos, from a checkpoint
decode_latents      latents that were saved -> pictures and videos
evaluate_digits     the fraction of digits that a classifier recognises; only in a checkout
evaluate_pictures   how close pictures are to training pictures with the same caption, and how clean
compare_trainings   variants of a configuration trained with several seeds, and judged
fit_run             writes train.yaml next to shards, for a given time and this machine
plan_run            memory, traffic and time of a run on other machines
check_layouts       compares the numbers of every parallel layout with one process
rehearsal_encoders  random encoders in a folder, to try packing and training without a download

`runs` is no script: it has the runs to start from, one function each, of which `pretrain_dit
--recipe NAME` chooses one. The YAML files to start from are in `conf/`.
"""
