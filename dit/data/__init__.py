"""Shards -> packs. Energon reads and shuffles; everything ends in a PackedBatch.

    loader      build_train_loader, build_val_loader, build_val_packs; PackLoader
    chain       Energon's chain of datasets, from folders or mock data to a loader
    encoder     Energon's task encoder: cook, group, pack
    cook        head of a record -> its length; record -> LatentSample, or the reason why not
    formats     the two layouts of a record: ours and DFM's
    packing     which samples share a pack (integers)
    pack        group of samples -> PackedBatch
    members     where the files of a sample lie in a shard, read when it is chosen
    whole_reader Energon's reader for the samples that are not plain, with bounds
    streams     our links in Energon's chain: damage, counts
    groups      our links that choose the samples of a pack, and the next pack
    turns       which pack is next, so that all ranks train packs of like cost (integers)
    guarded     Energon's loader without its hangs
    shares      which samples a reader reads
    position    where the readers stand, as a checkpoint keeps it
    moving      a saved position on another number of ranks or workers
    mock        synthetic samples, read like any other
    source      folders, splits and null text
    card        what the dataset card says, and whether a model fits it
    preflight   what can be known of the data before the first step
    identity    what a saved loader state belongs to
    rejects     reasons, counts, DataError

No torch.distributed here: ranks come as arguments.
"""

from dit.data.data_card import dataset_card
from dit.data.datasets import dataset_sizes, null_text
from dit.data.energon.resumable_loader import deaths_in_words
from dit.data.loader import (
    PackLoader,
    ValidationPacks,
    build_train_loader,
    build_val_loader,
    build_val_packs,
)
from dit.data.preflight import check_data, data_line
from dit.data.rejections import DataError, Reject, RejectCounts, sum_counts
from dit.data.resume.fingerprint import places_of

__all__ = [
    "DataError",
    "PackLoader",
    "Reject",
    "RejectCounts",
    "ValidationPacks",
    "build_train_loader",
    "build_val_loader",
    "build_val_packs",
    "check_data",
    "data_line",
    "dataset_card",
    "dataset_sizes",
    "deaths_in_words",
    "null_text",
    "places_of",
    "sum_counts",
]
