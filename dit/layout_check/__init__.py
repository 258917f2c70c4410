"""Checks that every parallel layout computes the same numbers. No part of a training run.

program    The command line: packs, a probe on each layout, comparisons, the report.
names      What is trained: names of parallel layouts, such as `tp2+sp+cp2`, and tiny networks.
adam_gaps  How far apart updates of Adam may be whose gradients differ by rounding.
probe      What a few steps did to every weight, in a form that does not depend on the layout.
report     How far the numbers of a layout lie from those of one process, and tables of it.
rounding   How far apart rounding of gradients may bring weights.
"""
