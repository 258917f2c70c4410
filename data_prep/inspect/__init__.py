"""Reads a finished dataset, and writes an HTML page about it.

read_shards   counts, shapes, statistics and checksums of every shard
duplicates    pictures that look alike, and captions that repeat
html_pages    HTML pages without a server or network: a searchable list of samples (page.html), with
              as many pictures and clips as there is room for
dataset_page  the page of a dataset, with decoded pictures and clips
"""
