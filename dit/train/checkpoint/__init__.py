"""The run on disk: saved while it trains, and continued from there.

What is on disk, who writes it, and when. "First rank" is global rank 0 in the trainer's thread;
threads of `async_save` write while the next steps are computed.

RUN/                             checkpoint.save
  .lock                          first rank, from the start to the end (`opening.start.run_folder`)
  config.yaml, *.jsonl,          first rank: configuration at each start, a line a step or a sample
    tensorboard/                 that was left out (`dit.train.metrics`)
  validation_generation/         all ranks, at a validation (`dit.sampling.validation`)
  checkpoints/.partial_step_N/   a checkpoint that is being written; no resume takes it
  checkpoints/step_N/            a complete one: renamed by the first rank when all files are there
    __R_*.distcp                 threads of each rank R: its share of weights, average, optimizer
    common.pt                    first rank: steps so far, counters of the optimizer
    .metadata, metadata.json     first rank, when all shares are written: index of tensors
    loader_D.pt                  a thread of the rank that reads for data rank D: place in the data
    config.yaml                  first rank, like all below: the resolved configuration
    log_interval.safetensors     sums since the last log step, by rank
    dataset_card.json            what generation needs of the dataset: codec and text encoder,
    null_text.safetensors        inputs of a sample without caption
    lora.json                    of adapters: their ranks, and where their base is
    origin.json                  files of the weights that the run started from, if any
    manifest.json                format, sizes and checksums of all these; the last file
  checkpoints/LATEST             first rank, after the rename: name of the newest checkpoint
  checkpoints/LOWEST_VAL         of the one with the lowest validation loss, which is kept

saving         when a run is saved, and what can be done with it when finished
state_dict     what a checkpoint holds, and how it is loaded
adapters       start of a run of adapters, with the frozen weights beside them
data_position  the loaders' states of a checkpoint
shares         which rank writes and reads which weight
exchange       state of weights on its way between the ranks that update it and those that store it
async_save     a checkpoint is gathered, written and published, in the background where configured
object_store   checkpoints in an object store: written, read again, fetched
mirror         copies of the finished checkpoints there (checkpoint.mirror)
starting_point the checkpoint that a run starts from, and the folder that it may be saved into
"""
