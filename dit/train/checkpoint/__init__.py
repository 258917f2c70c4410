"""Checkpoints of a run: how they are saved, and how a run resumes from one.

The table shows each file, who writes it, and when. "First rank" is global rank 0 in the trainer's
thread; threads of `async_save` write while the next steps are computed.

RUN/                             checkpoint.save
  .lock                          first rank, from the start to the end (`opening.start.run_folder`)
  config.yaml, *.jsonl,          first rank: configuration at each start, a line for each step or
    tensorboard/                 refused sample (`dit.train.metrics`)
  validation_generation/         all ranks, at a validation (`dit.sampling.validation`)
  checkpoints/.partial_step_N/   a checkpoint that is being written; no resume uses it
  checkpoints/step_N/            a complete one: renamed by the first rank when all files exist
    __R_*.distcp                 threads of each rank R: its shards of weights, EMA and optimizer
    common.pt                    first rank: steps so far, counters of the optimizer
    .metadata, metadata.json     first rank, when all shards are written: index of tensors
    loader_D.pt                  a thread of the rank that reads for data rank D: data position
    config.yaml                  first rank, as all files below: the resolved configuration
    log_interval.safetensors     sums since the last log step, by rank
    dataset_card.json            facts about the dataset for generation: codec and text encoder
    null_text.safetensors        inputs that replace those of a dropped caption
    lora.json                    for adapters: their ranks, and the path of their base
    origin.json                  files of the weights that the run started from, if any
    manifest.json                format, sizes and checksums of all these; the last file
  checkpoints/LATEST             first rank, after the rename: name of the newest checkpoint
  checkpoints/LOWEST_VAL         name of the one with the lowest validation loss, which stays

saving         when a run is saved, and commands for a finished run
state_dict     the content of a checkpoint, and how it is loaded
without_tensors  what a checkpoint holds, and whether it fits a run, without reading tensors
adapters       start of a run with adapters and their frozen weights
data_position  the loaders' states of a checkpoint
shares         the rank that writes and reads each weight
exchange       sends weights and their state between the ranks that update and those that store them
async_save     gathers, writes and publishes a checkpoint, in the background if configured
object_store   checkpoints in an object store: written, verified, fetched
mirror         copies of finished checkpoints in an object store (checkpoint.mirror)
starting_point the checkpoint from which a run starts, and checks of its folder
"""
