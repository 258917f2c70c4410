"""What will become of each file, decided before anything is encoded.

1. `plan`  planned samples of a source, in packing order, as `plan.jsonl`
2. `page`  the same as a page with pictures and histograms
"""
