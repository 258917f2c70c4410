"""Reads a finished dataset back.

read_shards  counts, shapes, statistics and checksums of every shard
html_pages   HTML pages without a server or network; the one of a dataset, with decoded pictures
"""
