"""Fits a configuration to a dataset, the available time and the device, as train.yaml.

rules       results of measured runs: sizes, noise levels, learning rate, passes
corpus      reads sizes, tokens and captions of the samples from shards
proposal    chooses a run for corpus, time and seconds of a step, with warnings
step_time   seconds of a step: measured on this machine, or planned for a GPU
train_yaml  writes the run as a configuration with reasons as comments
program     the command `recipes/fit_run.py`, which packing calls, too
"""
