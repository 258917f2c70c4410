"""Caches of other tools, read into our shards and written from them.

1. `records`    what a sample is, whatever holds it; reads our shards
2. `automodel`  NeMo AutoModel: `WxH/<hash>.meta` and `metadata.json`
3. `parquet`    FastVideo: Parquet with bytes, shape and type of each tensor
4. `dfm`        NVIDIA DFM: shards of `.pth`, `.pickle` and `.json`
5. `convert`    any of them -> our shards
"""
