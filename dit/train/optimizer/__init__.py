"""The optimizers of the weights, one update, and optimizer states.

build           the optimizer of a run, its parameter groups, and frozen weights
adamw           AdamW without Transformer Engine, or with moments in host memory
muon            Muon, for matrices of attention and feed-forward
whole_matrices  sharded matrices, gathered on one owner rank for an update
narrow_moments  Adam's moments in fewer bits, by Transformer Engine
update          one clipped update of the weights, and the learning-rate schedule
states          the optimizer states of each weight, in the form of checkpoints
ema             the moving average of the weights (EMA)
foreach         one operation on all weights

`OptimizerConfig.states` has the names of the states and their bytes for each number; memory
estimate, planner and checkpoints use it.
"""
