"""Converts caches of other tools to shards, and shards to these caches.

cached_samples  a sample of any format, with checks of its content; reads our shards
automodel       NeMo AutoModel: `WxH/<hash>.meta` and `metadata.json`
parquet         FastVideo: Parquet with bytes, shape and type of each tensor
dfm             NVIDIA DFM: shards of `.pth`, `.pickle` and `.json`
mlperf          MLPerf Training's FLUX.1: shards of parts in bfloat16, read or linked
convert         each of these formats -> our shards
export          our shards -> some of these formats
"""
