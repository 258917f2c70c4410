"""A finished dataset, read back.

html     Pages that open without a server or a network.
page     A page of what a packed dataset shows when it is decoded again.
reading  Reads a finished dataset folder back: counts, shapes, statistics, and every checksum.
"""
