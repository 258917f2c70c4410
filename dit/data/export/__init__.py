"""Our shards for other trainers: samples as dicts, and batches under the names of AutoModel.

    samples   NumberedSamples: the samples of any folder; ShardSamples: a split of our shards
    caches    CacheSamples: those of a cache of AutoModel; open_samples
    order     BucketSampler: batches of samples of one shape; SampleStream: one after the other
    batches   samples -> a batch with AutoModel's keys
    loaders   build_video_multiresolution_dataloader and its sister; state of a loader

Nothing here packs, and nothing needs torch.distributed: rank and world come as arguments.
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
