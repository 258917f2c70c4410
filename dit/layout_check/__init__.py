"""Checks that every parallel layout computes the same numbers; not used in training.

program    the command line: packs, a probe on each layout, comparisons, the report
names      names of parallel layouts, such as `tp2+sp+cp2`, and of tiny networks
adam_gaps  bound of the difference between updates of Adam whose gradients differ by rounding
probe      the effect of a few steps on every weight, in the same form on every layout
report     differences between a layout and one process, and tables of them
rounding   bound of the difference that rounding of gradients may cause in weights
"""
