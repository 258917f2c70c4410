"""What is measured, and against what: no part of a run.

mixtures    sample lengths of realistic data
fill        how full packs get, and how long that takes
stragglers  how much longer the slowest rank takes than the mean
steps       what measured steps say together
peak        how fast the device multiplies matrices
padded      Diffusers' model in a plain loop, padded or in buckets
"""
