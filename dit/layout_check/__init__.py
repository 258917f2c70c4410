"""A check that training has the same numbers on every layout. No part of a run imports it.

names     names of parallel layouts, such as `tp2+sp+cp2`, and their settings
probe     a few training steps, and what they did to every weight, gathered from all ranks
report    differences between a layout and one process, and tables of them
"""
