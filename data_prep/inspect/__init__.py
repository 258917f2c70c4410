"""Reads a finished dataset back.

reading  counts, shapes, statistics and checksums of every shard
page     HTML pages without a server or network; the one of a dataset, with decoded pictures
"""
