"""One page about one run or several: `python -m dit.report RUN_DIR [RUN_DIR ...]`.

The page is a single HTML file with all curves and pictures inside. It adapts to phones and to dark
mode. Nothing here imports torch.

reading     a run folder -> `RunRecord`
series      its metrics -> the curves of each chart
comparison  runs whose losses compare, and what keeps others from it
charts      curves -> inline SVG
lengths     histogram of the lengths of samples
findings    warnings with remedies: fill of packs, skipped steps, refused samples, spikes
figures     tables: summary, settings that differ, data, environment
pictures    samples over the steps, with a slider; pictures with their prompts
page        all of it -> HTML; page.js has what moves
server      the page of runs that go on (--watch)
local_server  serves a page over HTTP, to this machine only
"""
