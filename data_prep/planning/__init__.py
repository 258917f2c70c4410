"""Plans what is packed: decides before encoding whether and how each file is packed.

splits      key of a sample -> its split
plan        `plan.jsonl`: the planned samples of a source, sorted by a hash of their file
statistics  counts, histograms, expected bytes and packs of a plan; area lost to cropping
plan_page   the plan as an HTML page with pictures and histograms
"""
