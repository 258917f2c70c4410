"""A plan -> samples, on many processes, and never the same work twice.

1. `work`    one block of the plan -> the files of its samples
2. `engine`  hands blocks to processes as they get free; results come back in order
3. `ledger`  what is written, so that a killed run continues
4. `ranks`   several launched processes that share one output folder
"""
