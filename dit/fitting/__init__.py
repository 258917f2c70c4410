"""A configuration that fits a dataset, the available time and the device, written as train.yaml.

rules       results of measured runs: sizes, noise levels, learning rate, passes
corpus      shards -> sizes, tokens and captions of the samples
proposal    corpus, time and seconds of a step -> the run, with warnings
step_time   seconds of a step: measured here, or planned for a GPU
train_yaml  the run -> a configuration with reasons as comments
program     the command `recipes/fit_run.py`, which packing calls, too
"""
