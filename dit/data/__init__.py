"""Data of a run: Energon reads and shuffles samples of shards, which become packs (PackedBatch).

    loader        build_train_loader, validation_groups, build_val_packs; PackLoader
    datasets      folders, splits and the inputs of a dropped caption
    preflight     checks before the first step: shards, indices, the dataset card
    tar_reader    position and reading of a sample's files in a shard
    records       the three forms of a record in a shard: this project's, DFM's and MLPerf's
    cook          decodes a record to a LatentSample, or refuses it; its length from its head alone
    mock          synthetic samples, which are read like any others
    pack          joins samples to a PackedBatch
    rejections    reasons and counts of refused samples; DataError
    energon       this project's stages in Energon's chain of datasets; Energon's private members
    loader_state  the state of loaders in a checkpoint, and the run to which it belongs
    reshard       a saved loader state on another number of ranks or workers
    export        samples and batches for other trainers, without packs

No file of this folder uses torch.distributed: ranks come as arguments.
"""

from dit.data.datasets import dataset_sizes, null_inputs
from dit.data.energon.resumable_loader import deaths_in_words
from dit.data.energon.validation_groups import ValidationGroups, ValidationPacks
from dit.data.loader import PackLoader, build_train_loader, build_val_packs, validation_groups
from dit.data.loader_state import LoaderLayout, places_of
from dit.data.preflight import check_data, dataset_card
from dit.data.rejections import DataError, Reject, RejectCounts, sum_counts
