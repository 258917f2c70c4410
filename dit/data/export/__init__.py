"""Our shards for other trainers: samples as dicts, and batches under the names of AutoModel.

    samples        NumberedSamples: what the samples of any folder have in common
    shard_samples  ShardSamples: those of a split of our shards
    caches         CacheSamples: those of a cache of AutoModel; open_samples
    shares         who gets which samples; whether a state is of the same order
    stream         SampleStream: one sample after the other
    buckets        samples of one shape share a batch; the order of batches, the same on every rank
    batches        samples -> a batch with AutoModel's keys
    loaders        build_video_multiresolution_dataloader and its sister; state of a loader

Nothing here packs, and nothing needs torch.distributed: rank and world come as arguments.
"""

from dit.data.export.buckets import BucketSampler
from dit.data.export.caches import CacheSamples, open_samples
from dit.data.export.loaders import (
    BucketLoader,
    TextToImageDataloaderConfig,
    TextToVideoDataloaderConfig,
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from dit.data.export.shard_samples import ShardSamples
from dit.data.export.stream import SampleStream

__all__ = [
    "BucketLoader",
    "BucketSampler",
    "CacheSamples",
    "SampleStream",
    "ShardSamples",
    "TextToImageDataloaderConfig",
    "TextToVideoDataloaderConfig",
    "build_text_to_image_multiresolution_dataloader",
    "build_video_multiresolution_dataloader",
    "open_samples",
]
