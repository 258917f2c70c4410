"""The optimizers of the weights, one update, and optimizer states.

build           the optimizer of a run, its parameter groups, and frozen weights
adamw           AdamW without Transformer Engine, or with moments in host memory
muon            Muon, for matrices of attention and feed-forward
whole_matrices  matrices that ranks hold in parts, gathered on one of them for a moment
narrow_moments  Adam's moments in fewer bits, by Transformer Engine
update          one clipped update of the weights, and the schedule of its learning rate
states          the optimizer states of each weight, in the form of checkpoints
ema             the average of the weights
foreach         one operation on all weights

`OptimizerConfig.states` lists the states by name and in bytes for each number; memory estimate,
planner and checkpoints use it.
"""
