"""Writes one page about one run or several: `python -m dit.report RUN_DIR [RUN_DIR ...]`.

The page is a single HTML file with all curves and pictures inside. It adapts to phones and to dark
mode. Only the count of parameters imports torch and Megatron-Core: the network is built on the meta
device.

reading     a run folder -> `RunRecord`
series      its metrics -> the curves of each chart
comparison  runs whose losses are comparable, and why others are not
charts      curves -> inline SVG
lengths     histogram of the lengths of samples
findings    warnings with remedies: fill of packs, skipped steps, refused samples, spikes
figures     tables: summary, settings that differ, data, environment
pictures    samples over the steps, with a slider; pictures with their prompts
page        all parts -> HTML; page.js has the interactive parts
server      the page of runs in progress (--watch)
local_server  serves a page over HTTP, to this machine only
"""
