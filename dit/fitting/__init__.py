"""A run that fits a dataset, and the time and device at hand: train.yaml beside the shards.

rules       measured runs, and what they say: sizes, noise levels, learning rate, passes
corpus      shards -> sizes, tokens and captions of the samples
proposal    corpus, seconds and a clock of steps -> the run, the reasons, the warnings
step_time   seconds of a step: measured here, or planned for a GPU
train_yaml  the run -> a configuration whose comments say why
program     the command `recipes/fit_run.py`, which packing calls as well
"""
