"""Estimates for a run on other machines: memory, communication and time, by arithmetic alone.

No part of a run imports it.

efficiency     the fractions of a device's peak that software reaches: assumed, or published
layer_traffic  bytes that a layer moves through a device's memory, from a table of counts
traffic        bytes that ranks send each other in a step, and bytes of a checkpoint
times          seconds of a step, from operations, bytes and rates
layouts        every layout of a number of devices, the fastest first, and why others do not work
tables         plans as tables on the terminal, and as JSON
"""
