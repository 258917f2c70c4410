"""The optimizer: which one trains which weights, one update, and what it keeps.

build           the optimizer of a run, its parameter groups, and frozen weights
adamw           AdamW where Transformer Engine's is missing, or with moments in host memory
muon            Muon, for matrices of attention and feed-forward
whole_matrices  matrices of which ranks have parts, whole on one of them for a moment
narrow_moments  Adam's moments in fewer bits, by Transformer Engine
update          one clipped update of the weights, and the schedule of its learning rate
states          what the optimizer keeps of each weight, as a checkpoint has it
foreach         one operation on all weights

What an optimizer keeps of each number, by name and in bytes, is `OptimizerConfig.states`, which
memory, planner and checkpoints ask.
"""
