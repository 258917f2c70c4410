"""The run on disk: saved while it trains, and continued from there.

resume         where a run starts from, when it is saved, what can be done with it when finished
state_dict     what a checkpoint holds, and how it is loaded
adapters       what a run of adapters trains, and where the frozen weights beside them are
data_position  the loaders' states of a checkpoint
shares         which rank writes and reads which weight
exchange       state of weights on its way between the ranks that update it and those that store it
async_save     a checkpoint is gathered, written and published, in the background where configured
distcp         Megatron-Core's sharded checkpoint in three parts
object_store   checkpoints in an object store: written, read again, fetched
mirror         copies of the finished checkpoints there (checkpoint.mirror)
origin         files that the first weights came from, and their digest
paths          which checkpoint a path means, and whether its files are as they were saved
"""
