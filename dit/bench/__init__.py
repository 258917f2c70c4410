"""What is measured, and against what: no part of a run.

mixtures    sample lengths of realistic data
fill        how full packs get, and how long that takes
stragglers  how much longer the slowest rank takes than the mean
"""
