"""Shards for other trainers: samples as dicts, and batches under the names of NeMo AutoModel.

    samples   NumberedSamples: the samples of any folder; ShardSamples: a split of a dataset folder
    caches    CacheSamples: the samples of a cache of AutoModel; open_samples
    order     BucketSampler: batches of samples of one shape; SampleStream: one by one
    batches   joins samples to a batch with AutoModel's keys
    loaders   AutoModel's loaders for videos and for pictures; state of a loader

This folder neither packs nor needs torch.distributed: rank and world size come as arguments.
"""

from dit.data.export.caches import CacheSamples, open_samples
from dit.data.export.loaders import (
    BucketLoader,
    TextToImageDataloaderConfig,
    TextToVideoDataloaderConfig,
    build_text_to_image_multiresolution_dataloader,
    build_video_multiresolution_dataloader,
)
from dit.data.export.order import BucketSampler, SampleStream
from dit.data.export.samples import ShardSamples
