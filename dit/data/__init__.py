"""Shards -> packs. Energon reads and shuffles; everything ends in a PackedBatch.

    loader      build_train_loader, build_val_loader, build_val_packs; PackLoader
    chain       Energon's chain of datasets, from folders or mock data to a loader
    encoder     Energon's task encoder: cook, group, pack
    cook        head of a record -> its length; record -> LatentSample, or the reason why not
    formats     the two layouts of a record: ours and DFM's
    packing     which samples share a pack (integers)
    pack        group of samples -> PackedBatch
    members     where the files of a sample lie in a shard, read when it is chosen
    streams     our links in Energon's chain: damage, counts
    groups      our links that choose the samples of a pack, and the next pack
    turns       which pack is next, so that all ranks train packs of like cost (integers)
    guarded     Energon's loader without its hangs
    shares      which samples a reader reads
    position    where the readers stand, as a checkpoint keeps it
    moving      a saved position on another number of ranks or workers
    mock        synthetic samples, read like any other
    source      folders, splits, dataset card and null text
    identity    what a saved loader state belongs to
    rejects     reasons, counts, DataError
    safe_pickle unpickling that runs no code

No torch.distributed here: ranks come as arguments.
"""

from dit.data.guarded import deaths_in_words
from dit.data.identity import places_of
from dit.data.loader import (
    PackLoader,
    ValidationPacks,
    build_train_loader,
    build_val_loader,
    build_val_packs,
)
from dit.data.rejects import DataError, Reject, Tally, add_up
from dit.data.source import dataset_card, dataset_sizes, null_text

__all__ = [
    "DataError",
    "PackLoader",
    "Reject",
    "Tally",
    "ValidationPacks",
    "add_up",
    "build_train_loader",
    "build_val_loader",
    "build_val_packs",
    "dataset_card",
    "dataset_sizes",
    "deaths_in_words",
    "null_text",
    "places_of",
]
