"""Our shards for other trainers: samples as dicts, and batches under the names of AutoModel.

    shard_samples  ShardSamples: the samples of a split by number; SampleStream: one after the other
    buckets        samples of one shape share a batch; the order of batches, the same on every rank
    batches        samples -> a batch with AutoModel's keys
    loaders        build_video_multiresolution_dataloader and its sister; state of a loader

Nothing here packs, and nothing needs torch.distributed: rank and world come as arguments.
"""

from dit.data.export.buckets import BucketSampler
from dit.data.export.loaders import (
    BucketLoader,
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from dit.data.export.shard_samples import SampleStream, ShardSamples

__all__ = [
    "BucketLoader",
    "BucketSampler",
    "SampleStream",
    "ShardSamples",
    "build_text_to_image_multiresolution_dataloader",
    "build_video_multiresolution_dataloader",
]
